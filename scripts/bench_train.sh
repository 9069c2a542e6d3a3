#!/usr/bin/env bash
# Every figure of training at the widths of a model: four layouts with each option switched off in turn, loss curves compared.
#   bash scripts/bench_train.sh FOLDER [PART ...] [-- OPTIONS of bench_train.py]
#     FOLDER   gets results.jsonl, curve_tp1.json, curve_tp2.json, and log.txt: what is printed
#     PART     some of: tp1 tp1_full tp2 tp2_full curve_tp1 curve_tp2 compare (default: all that the GPUs here allow)
#     OPTIONS  for every part, e.g. -- --model Qwen3.5-35B-A3B, or -- --tiny --steps 1 to see on a CPU that all parts run
# Without recompute: tp1 and tp2; with full recompute: tp1_full and tp2_full. Each part takes minutes: kernels are tuned first.
# A part that fails is said, and the others go on; the exit code is 1 then.
set -euo pipefail
if (($# == 0)) || [[ $1 == -* ]]; then
  echo "bench_train.sh: give a folder for the results; see the head of the file" >&2
  exit 2
fi
mkdir -p "$1"
folder=$(realpath "$1")
shift
parts=()
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    tp1 | tp1_full | tp2 | tp2_full | curve_tp1 | curve_tp2 | compare) parts+=("$1") ;;
    *) echo "bench_train.sh: no part $1; see the head of the file" >&2; exit 2 ;;
  esac
  shift
done
(($#)) && shift
options=("$@")
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x $python ]] || python=${SLIME_CUA_PYTHON:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((${#parts[@]} == 0)); then
  parts=(tp1 tp1_full curve_tp1)
  ((gpus == 1)) || parts=(tp1 tp1_full tp2 tp2_full curve_tp1 curve_tp2 compare)
fi
failed=0
run() {
  local ranks=$1 code=0
  shift
  local launcher=()
  ((ranks == 1)) || launcher=(-m torch.distributed.run --standalone --nproc-per-node "$ranks")
  echo "== bench_train.py $*"
  "$python" "${launcher[@]}" scripts/bench_train.py "$@" || code=$?
  if ((code)); then
    failed=1
    echo "**failed** with exit code $code: $*"
  fi
}
part() {
  local rows=(--out "$folder/results.jsonl" "${options[@]}")
  # As many layers for both curves as fit a GPU at TP=1 with room to spare.
  local curve=(--curve 50 --layers 4 "${options[@]}")
  case $1 in
    tp1) run 1 --recompute none "${rows[@]}" ;;
    tp1_full) run 1 --recompute full "${rows[@]}" ;;
    tp2) run 2 --tp 2 --recompute none "${rows[@]}" ;;
    tp2_full) run 2 --tp 2 --recompute full "${rows[@]}" ;;
    curve_tp1) run 1 "${curve[@]}" --out "$folder/curve_tp1.json" ;;
    curve_tp2) run 2 --tp 2 "${curve[@]}" --out "$folder/curve_tp2.json" ;;
    compare) run 1 --compare "$folder/curve_tp1.json" "$folder/curve_tp2.json" ;;
  esac
}
{
  echo "$gpus GPUs, parts: ${parts[*]}"
  for name in "${parts[@]}"; do part "$name"; done
  exit $failed
} 2>&1 | tee -a "$folder/log.txt"
