"""Does KVM work? A guest is booted with it: /dev/kvm can be opened on machines where no guest ever runs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

PROBE_TIMEOUT_S = 20
_EXIT_PORT = 0xF4
_MAGIC = 0x2A
PROBE_EXIT_CODE = (_MAGIC << 1) | 1
"""What qemu ends with when the guest has written its number to the isa-debug-exit port."""
_CODE = bytes((0xB0, _MAGIC, 0xE6, _EXIT_PORT, 0xF4))
"""mov al, number; out port, al; hlt: run by the BIOS from the first sector of the disk."""


def probe_script(cpu: str = "host") -> str:
    """Lines of /bin/sh that boot the guest with KVM; exit code PROBE_EXIT_CODE only if its code ran."""
    sector = _CODE + bytes(510 - len(_CODE)) + b"\x55\xaa"
    octal = "".join(f"\\{byte:03o}" for byte in sector)
    return (
        "set -u; d=$(mktemp -d) || exit 2; trap 'rm -rf \"$d\"' EXIT\n"
        f"printf '{octal}' > \"$d/disk\"\n"
        f"timeout -s KILL {PROBE_TIMEOUT_S} qemu-system-x86_64 -accel kvm -cpu {cpu} -m 32 -nodefaults -display none "
        f'-no-reboot -device isa-debug-exit,iobase={_EXIT_PORT:#x},iosize=1 -drive file="$d/disk",format=raw,if=ide'
    )


def qemu_is_missing() -> bool:
    """No qemu-system-x86_64 here."""
    return shutil.which("qemu-system-x86_64") is None


def kvm_fault() -> str | None:
    """Why KVM is not used on this machine, or None when the probe guest ran with it. Takes PROBE_TIMEOUT_S at most."""
    if not Path("/dev/kvm").exists():
        return "there is no /dev/kvm"
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", probe_script()],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_TIMEOUT_S + 10,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return fault_of(done.returncode, done.stderr)


def fault_of(code: int, said: str) -> str | None:
    """The reading of a probe's end."""
    if code == PROBE_EXIT_CODE:
        return None
    last = said.strip().splitlines()[-1:] or [f"exit code {code}"]
    return f"a probe guest did not boot with KVM: {last[0][:300]}"
