#!/usr/bin/env bash
# Brings what the providers `docker` and `qemu` are tested with for real, and runs the provider suite on them: Docker's daemon and
# SDK, QEMU, a guest kernel. Debian or Ubuntu, as root; about 400 MB on disk. Guests are emulated where KVM does not work.
#   bash scripts/providers.sh              everything
#   bash scripts/providers.sh --only-make  bring it, run nothing
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '[providers] %s\n' "$*"; }
wanted=(docker.io iproute2 qemu-system-x86 qemu-utils busybox-static e2fsprogs)
missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi
bash scripts/env.sh
if [ ! -d .venvs/docker/docker ]; then
  say "installing Docker's SDK into .venvs/docker"
  .venv/bin/python -m pip --disable-pip-version-check install -q --no-deps --target .venvs/docker 'docker==7.2.0'
fi
if ! compgen -G '.venvs/kernel/boot/vmlinuz-*' >/dev/null; then
  package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-[0-9]/ {print $2; exit}')
  say "unpacking $package into .venvs/kernel (it is not installed)"
  (cd "$(mktemp -d)" && apt-get download -qq "$package" && dpkg -x ./*.deb "$OLDPWD/.venvs/kernel")
fi
[ "${1:-}" = --only-make ] && exit 0
exec bash scripts/test.sh -m 'docker or vm' tests/contract/test_provider_contract.py "$@"
