#!/usr/bin/env bash
# Makes .venvs/osworld, an environment of its own for OSWorld's client (its pins fit no other of ours), and lets that client
# drive a leased desktop through the gateway. 30 MB to download the first time; a minute to run.
#   bash scripts/osworld_client.sh              make it, run the contract test
#   bash scripts/osworld_client.sh --only-make  make it, print the line for SLIME_CUA_OSWORLD_PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
client=desktop-env==1.0.2
python=$PWD/.venvs/osworld/bin/python
if ! "$python" -c 'import desktop_env, requests_toolbelt' 2>/dev/null; then
  "${SLIME_CUA_PYTHON:-python3}" -m venv .venvs/osworld
  pip=("$python" -m pip --disable-pip-version-check install -q)
  "${pip[@]}" --no-deps "$client"
  # What its controllers import; the rest of its list (torch, evaluators, cloud SDKs) they do not need.
  "${pip[@]}" requests==2.32.5 requests_toolbelt==1.0.0
fi
export SLIME_CUA_OSWORLD_PYTHON=$python
if [ "${1:-}" = --only-make ]; then
  echo "export SLIME_CUA_OSWORLD_PYTHON=$python"
  exit 0
fi
exec bash scripts/test.sh tests/contract/test_gateway_osworld_client.py
