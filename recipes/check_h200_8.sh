#!/usr/bin/env bash
# All of check_h200.sh on 8 GPUs: bash recipes/check_h200_8.sh [FOLDER] [PART ...]
set -euo pipefail
exec bash "$(dirname "$0")/check_h200.sh" 8 "${1:-docs/runs/check_h200_8}" "${@:2}"
