#!/usr/bin/env bash
# Every figure of the sandbox cluster in one run: what the gateway adds to an action, its memory over ten minutes, local desktops
# at both screen sizes, captures. Tables with goals and verdicts, the machine named above them. About 20 minutes.
# Run it on a machine that does nothing else: `uptime` first; the load stands in each table.
#   bash scripts/bench_sandbox.sh [--minutes N] [--quick] [FILE]
#     --minutes N   watch the gateway's memory for so long (default 10)
#     --quick       the smallest settings, to see that every table comes; its figures say nothing
#     FILE          gets the tables, too (default: nowhere else)
# A part that fails is a line of its table, and the others go on; the exit code is 1 then.
set -euo pipefail
minutes=10
gateway=(--desktops 128 --seconds 30 --rate 300)
desktops=(--desktops 16)
file=/dev/null
while (($#)); do
  case $1 in
    --minutes) minutes=${2:?--minutes needs a number}; shift 2 ;;
    --quick) minutes=0.1; gateway=(--desktops 4 --seconds 3 --rate 20); desktops=(--desktops 2 --repeats 1); shift ;;
    -*) echo "bench_sandbox.sh: no option $1; see the head of the file" >&2; exit 2 ;;
    *) file=$1; shift ;;
  esac
done
file=$(realpath -m "$file")
cd "$(dirname "$0")/.."
bash scripts/env.sh
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
failed=0
run() {
  local code=0
  .venv/bin/python "$@" || code=$?
  if ((code)); then
    failed=1
    echo "**failed** with exit code $code: $*"
  fi
}
{
  run -c 'import sys; sys.path.insert(0, "scripts"); from bench_tables import machine; print(machine())'
  run scripts/bench_gateway.py "${gateway[@]}" --minutes "$minutes"
  run scripts/bench_sandbox.py --size 1504x832 "${desktops[@]}"
  run scripts/bench_sandbox.py --size 640x384 "${desktops[@]}"
  exit $failed
} | tee "$file"
