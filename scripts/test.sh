#!/usr/bin/env bash
# Installs what is missing, then lint, types, unit, contract, numerics and a short end-to-end run.
#   bash scripts/test.sh                  everything (about 20 minutes on 2 cores)
#   bash scripts/test.sh tests/unit -k x  the same set-up, then pytest with these arguments only
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/env.sh
triton_pin=triton==3.6.0
if ! .venv/bin/python -c 'import triton' 2>/dev/null && [ ! -d .venvs/triton/triton ]; then
  echo "[test] installing $triton_pin beside .venv: the GPU kernels run in its interpreter (about 200 MB to download)"
  .venv/bin/python -m pip --disable-pip-version-check install -q --no-deps --target .venvs/triton "$triton_pin" 2>.venv/triton.log ||
    echo "[test] no $triton_pin for this machine: those tests are skipped"
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH="$PWD"
pytest=(.venv/bin/python -m pytest -q)
if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi
step() { printf '\n== %s (%s s)\n' "$1" "$SECONDS"; }
step "lint"
.venv/bin/ruff check .
.venv/bin/ruff format --check -q .
step "types"
.venv/bin/mypy slime_cua rollout sandbox_cluster megatron_patches
step "tests"
"${pytest[@]}" -m "not gpu" --durations=15 tests/unit tests/contract tests/numerics tests/e2e
step "done"
