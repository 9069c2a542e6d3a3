#!/usr/bin/env bash
# Make the starter tasks anew: ten families of short desktop tasks, each a function of family, split and seed.
# Takes a second; with the numbers below the files in tasks/starter come out byte for byte as they ship.
#
#   bash recipes/make_starter_tasks.sh                                             what ships: 64 + 16 + 20 a family
#   bash recipes/make_starter_tasks.sh --out runs/tasks --train 500 --heldout 50   more, for longer runs
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
if [[ -x .venv/bin/python && -z "${PYTHON:-}" ]]; then
  python=.venv/bin/python
fi
"$python" -m slime_cua.synthesis.starter.generate "$@"
