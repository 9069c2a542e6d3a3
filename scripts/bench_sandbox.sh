#!/usr/bin/env bash
# Every figure of the sandbox cluster in one run: what the gateway adds to an action, its memory over ten minutes, local desktops
# at both screen sizes, captures. Tables with goals and verdicts, the machine named above them. About 20 minutes.
# Run it on a machine that does nothing else: `uptime` first; the load stands beside each table.
#   bash scripts/bench_sandbox.sh [FILE]     FILE: gets the tables, too (default: nowhere else)
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/env.sh
export OMP_NUM_THREADS=1 PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
run() { .venv/bin/python "$@"; }
{
  run -c 'import sys; sys.path.insert(0, "scripts"); from bench_tables import machine; print(machine())'
  run scripts/bench_gateway.py --desktops 128 --seconds 30 --rate 100 --minutes 10
  run scripts/bench_sandbox.py --size 1504x832 --desktops 16
  run scripts/bench_sandbox.py --size 640x384 --desktops 16
} | tee "${1:-/dev/null}"
