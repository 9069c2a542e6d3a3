#!/usr/bin/env bash
# All of check_h200.sh on 4 GPUs: bash recipes/check_h200_4.sh [FOLDER] [PART ...]
set -euo pipefail
exec bash "$(dirname "$0")/check_h200.sh" 4 "${1:-docs/runs/check_h200_4}" "${@:2}"
