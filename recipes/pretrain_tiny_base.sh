#!/usr/bin/env bash
# Makes the tiny base policy of the quickstart: random weights learn to see, to point and to carry
# words on generated screens.
#
#   bash recipes/pretrain_tiny_base.sh                  one GPU, about 10 minutes, 16 cores, 20 GB of GPU memory
#   bash recipes/pretrain_tiny_base.sh minutes=2        a try
#   bash recipes/pretrain_tiny_base.sh trainer.parallel.dp=2
#   DEVICE=cpu bash recipes/pretrain_tiny_base.sh batch_screens=8 num_chunks=2 num_workers=1 trainer.dtype=fp32
#
# What to expect (docs/tiny_base.md has the measured curve): the loss of colour pointing falls below 1 within the first half
# minute, six buttons by colour are hit from the second minute on, shapes, places and requests before the screen follow; reading
# does not come.
# The same command continues a run that was stopped. The gate prints hit rates beside chance and blanked images.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if [ -x .venv/bin/python ] && [ -z "${PYTHON:-}" ]; then python=.venv/bin/python; fi
run_dir="${SLIME_CUA_RUN_DIR:-runs/tiny_base}"
device="${DEVICE:-$("$python" -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")')}"

# 1. Train: our Megatron trainer, screens drawn by worker processes. Ends by the clock.
SLIME_CUA_RUN_DIR="$run_dir" "$python" -m slime_cua.synthesis.pretrain --config recipes/pretrain_tiny_base.yaml "$@"

# 2. Gate: screens that were never shown, every kind of question, blanked images; then answers word for word.
"$python" -m slime_cua.evaluation.pointing "$run_dir/final" --device "$device" --json "$run_dir/gate.json"
"$python" -m slime_cua.evaluation.answers "$run_dir/final" --device "$device" --json "$run_dir/answers.json"

echo "To ship these weights: cp $run_dir/final/model.safetensors models/tiny_base/"
