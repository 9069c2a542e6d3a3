#!/usr/bin/env bash
# Shows the whole system on 1, 2, 4 or 8 GPUs of one host, in at most nine minutes; docs/checks.md says what each part shows.
#   bash recipes/check_h200.sh GPUS FOLDER [PART ...] [--gateway URL] [--model FOLDER] [--minutes N]
#     FOLDER     gets report.md, results.json and the logs; parts measured before stay in the report
#     PART       some of: live faults layouts mfu (default: all, in this order)
#     --gateway  desktops of a gateway that runs (token in SLIME_CUA_GATEWAY_TOKEN); else local ones are started
#     --model    a policy after its cold start, e.g. runs/quickstart/hf/sft; else models/tiny_base with a short cold start
#   SLIME_CUA_SGLANG_PYTHON   the interpreter that has SGLang; empty: ours
#   SLIME_CUA_CHECK_DEVICE=cpu   the same code without a GPU: embedded engine, fp32, gloo, smaller numbers, four times the time
# A part that fails is a row that says why, and the others go on. Exit code: 0 when every goal is met, 1 when not, 2 for bad input.
set -euo pipefail
cd "$(dirname "$0")/.."
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
[[ ${SLIME_CUA_CHECK_DEVICE:-} != cpu ]] || export CUDA_VISIBLE_DEVICES=
python=.venv/bin/python
[[ -x $python ]] || python=${SLIME_CUA_PYTHON:-python3}
exec "$python" scripts/check_h200.py "$@"
