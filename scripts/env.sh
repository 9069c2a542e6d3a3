#!/usr/bin/env bash
# Makes .venv with the pinned CPU or GPU set and the system packages that local desktops need. Safe to run again: when
# nothing changed it takes a second. Says what it will install before it does.
#   bash scripts/env.sh            everything
#   SLIME_CUA_TORCH_INDEX=URL      where a CPU build of torch comes from, if pip would resolve to a CUDA build
#   SLIME_CUA_PYTHON=python3.12    the interpreter for .venv
set -euo pipefail
cd "$(dirname "$0")/.."
torch_pin=torch==2.13.0
python=${SLIME_CUA_PYTHON:-python3}
say() { printf '\033[1m[env]\033[0m %s\n' "$*"; }
die() { printf '[env] error: %s\n' "$*" >&2; exit 1; }

mapfile -t wanted < scripts/apt.txt
[ -x .venv/bin/pip ] || "$python" -c 'import ensurepip' 2>/dev/null || wanted+=("$(basename "$python")-venv")
missing=()
if command -v dpkg-query >/dev/null; then
  for package in "${wanted[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
else
  for tool in Xvfb bwrap openbox wmctrl; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  [ ${#missing[@]} -eq 0 ] || die "this is no Debian or Ubuntu: install these yourself: ${missing[*]}"
fi
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -eq 0 ]; then
    say "installing ${#missing[@]} system packages (about 120 MB on disk): ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  else
    die "these system packages are missing; run: sudo apt-get install -y --no-install-recommends ${missing[*]}"
  fi
fi

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "$python is missing or older than 3.11: install a newer one, then set SLIME_CUA_PYTHON"
mark=.venv/.installed
stamp=$(cat requirements/cpu.lock setup.py scripts/env.sh | sha256sum | cut -d' ' -f1)
compile() { # our modules, which pip leaves alone: where PYTHONDONTWRITEBYTECODE is set, every process of a run would compile them anew
  .venv/bin/python -m compileall -q slime_cua rollout sandbox_cluster megatron_patches tests >/dev/null || true
}
if [ -f "$mark" ] && [ "$(cat "$mark")" = "$stamp" ]; then compile; exit 0; fi
if [ ! -x .venv/bin/pip ]; then
  say "making .venv with $("$python" --version)"
  "$python" -m venv .venv || die "no venv module: apt-get install python3-venv, or set SLIME_CUA_PYTHON"
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check)
install() {
  "${pip[@]}" install -q "$@" >>.venv/pip.log 2>&1 || { tail -n 15 .venv/pip.log >&2; die "pip could not install $*: see .venv/pip.log"; }
}
install --upgrade pip "setuptools<81" wheel
if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    say "a GPU is here: installing $torch_pin as pip resolves it (a CUDA build, about 3 GB to download)"
    install "$torch_pin" numpy
  else
    # Held whole, not piped: a grep that ends at its first match would fail pip, and the pipe with it.
    resolved=$("${pip[@]}" install --dry-run --quiet --ignore-installed --report - "$torch_pin" 2>>.venv/pip.log || true)
    if [ -z "$resolved" ] || grep -qiE '"name": *"(nvidia|cuda)' <<<"$resolved"; then
      index=${SLIME_CUA_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
      say "installing the CPU build of $torch_pin from $index (about 200 MB to download)"
      install --index-url "$index" "$torch_pin"
    else
      say "installing the CPU build of $torch_pin (about 200 MB to download)"
      install "$torch_pin"
    fi
  fi
fi
say "installing the pinned Python packages of requirements/cpu.lock (about 500 MB to download)"
install -r requirements/cpu.lock
install --no-deps --no-build-isolation -e .
compile
printf '%s' "$stamp" > "$mark"
say "ready: .venv/bin/slime-cua --help"
