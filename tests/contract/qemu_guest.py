"""A tiny virtual machine: a kernel from the distribution, an initrd made here, a disk with the stand-in control server.

The kernel is taken from the folder SLIME_CUA_GUEST_KERNEL (default .venvs/kernel), which holds an unpacked package:

    apt-get download linux-image-6.1.0-57-cloud-amd64    # or whatever linux-image-cloud-amd64 depends on
    dpkg -x linux-image-*.deb .venvs/kernel
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from slime_cua.config.sandbox import DesktopConfig, MachineConfig, QemuConfig
from tests.contract import guest_rootfs

KERNEL = Path(
    os.environ.get("SLIME_CUA_GUEST_KERNEL", Path(__file__).resolve().parents[2] / ".venvs" / "kernel")
)
MODULES = ("virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci")
MODULES += ("virtio_blk", "failover", "net_failover", "virtio_net")
_FIRST = """#!/bin/sh
export PATH=/bin
mount -t proc proc /proc; mount -t devtmpfs dev /dev
for module in {modules}; do insmod /modules/$module.ko || echo "no $module"; done
for i in 1 2 3 4 5 6 7 8 9; do [ -b /dev/vda ] && break; sleep 0.2; done
ip link set lo up; ip link set eth0 up
ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
mount -t ext4 /dev/vda /root || exec sh
mount --move /dev /root/dev; mount -t tmpfs tmp /root/tmp
umount /proc
exec switch_root /root /srv/init
"""
_SECOND = """#!/bin/sh
export PATH=/usr/bin HOME=/home/user
/srv/mount
cd /home/user
exec /usr/bin/python3 -u /srv/osworld_guest.py --broken-bash
"""


def machine_is_missing() -> str:
    """Why no machine can be tried here; empty when one can."""
    for program in ("qemu-system-x86_64", "qemu-img", "busybox", "mke2fs"):
        if shutil.which(program, path=os.environ["PATH"] + ":/sbin:/usr/sbin") is None:
            return f"needs {program} (apt-get install qemu-system-x86 qemu-utils busybox-static e2fsprogs)"
    if not list(KERNEL.glob("boot/vmlinuz-*")):
        return f"needs a guest kernel in {KERNEL}: see tests/contract/qemu_guest.py"
    return ""


def build(folder: Path) -> DesktopConfig:
    """The disk and the initrd in `folder`, and the config that boots them."""
    root = guest_rootfs.build(folder / "root")
    busybox = Path(shutil.which("busybox") or "")
    shutil.copy(busybox, root / "srv/busybox")
    _program(root / "srv/init", _SECOND)
    _program(
        root / "srv/mount",
        "#!/bin/sh\n/srv/busybox mount -t proc proc /proc\n/srv/busybox mount -t sysfs sys /sys\n",
    )
    raw, disk = folder / "disk.raw", folder / "disk.qcow2"
    subprocess.run(["/sbin/mke2fs", "-q", "-t", "ext4", "-d", str(root), str(raw), "256M"], check=True)
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", str(raw), str(disk)], check=True)
    raw.unlink()
    [kernel] = KERNEL.glob("boot/vmlinuz-*")
    initrd = folder / "initrd"
    initrd.write_bytes(_initrd(folder / "initrd.d", busybox))
    append = "console=ttyS0 quiet panic=1 mitigations=off nokaslr no_timer_check tsc=reliable"
    return DesktopConfig(
        screen_wh_px=guest_rootfs.SIZE,
        boot_timeout_s=480,
        machine=MachineConfig(image=str(disk), memory_mb=192, num_cpus=1, kvm="off"),
        qemu=QemuConfig(
            arguments=(
                *("-kernel", str(kernel), "-initrd", str(initrd), "-append", append),
                *("-serial", f"file:{folder}/serial.log"),
            ),
        ),
    )


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def _initrd(folder: Path, busybox: Path) -> bytes:
    for name in ("bin", "modules", "proc", "dev", "root"):
        (folder / name).mkdir(parents=True)
    shutil.copy(busybox, folder / "bin/busybox")
    for name in ("sh", "mount", "umount", "insmod", "sleep", "ip", "switch_root", "echo", "["):
        (folder / "bin" / name).symlink_to("busybox")
    for name in MODULES:
        [module] = KERNEL.glob(f"lib/modules/*/kernel/**/{name}.ko")
        shutil.copy(module, folder / "modules")
    _program(folder / "init", _FIRST.format(modules=" ".join(MODULES)))
    return b"".join(_entry(path, folder) for path in sorted(folder.rglob("*"))) + _record(
        "TRAILER!!!", 0, b""
    )


def _entry(path: Path, root: Path) -> bytes:
    data = (
        str(path.readlink()).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
    )
    return _record(str(path.relative_to(root)), path.lstat().st_mode, data)


def _record(name: str, mode: int, data: bytes) -> bytes:
    """One entry of a cpio archive, format newc."""
    _record.inode = getattr(_record, "inode", 0) + 1  # type: ignore[attr-defined]
    fields = (_record.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)  # type: ignore[attr-defined]
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    head += bytes(-len(head) % 4)
    return head + data + bytes(-len(data) % 4)
