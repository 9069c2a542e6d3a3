"""A system call filter for local desktops: what a desktop program never needs and an attacker of the kernel likes.

The filter is a list of what is refused (EPERM), not of what is allowed: applications keep working, a kernel fault in an
allowed call stays open. Source: Linux `include/uapi/linux/{seccomp,filter,audit}.h` and the call tables of both machines.
"""

from __future__ import annotations

import platform
import struct

from slime_cua.core.errors import PreflightError

_DENIED_X86_64 = {
    "ptrace": 101, "syslog": 103, "uselib": 134, "pivot_root": 155, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "nfsservctl": 180,
    "lookup_dcookie": 212, "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "unshare": 272, "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at": 304,
    "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
_DENIED_AARCH64 = {
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "quotactl": 60,
    "acct": 89, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
    "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "settimeofday": 170, "add_key": 217,
    "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241,
    "fanotify_init": 262, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
    "process_vm_writev": 271, "finit_module": 273, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "mount_setattr": 442, "quotactl_fd": 443,
}  # fmt: skip
_JAIL_X86_64 = {
    "shmget": 29, "fork": 57, "vfork": 58, "msgget": 68, "memfd_create": 319, "memfd_secret": 447,
}  # fmt: skip
_JAIL_AARCH64 = {"msgget": 186, "shmget": 194, "memfd_create": 279, "memfd_secret": 447}
_JAIL = {"x86_64": _JAIL_X86_64, "aarch64": _JAIL_AARCH64}
_MACHINES = {"x86_64": (0xC000003E, _DENIED_X86_64), "aarch64": (0xC00000B7, _DENIED_AARCH64)}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _REFUSE, _MISSING, _ALLOW = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16
_X32_BIT = 0x40000000
_NAMESPACE_BITS = 0x7E020000
"""CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET."""
_THREAD_BIT = 0x00010000
"""CLONE_THREAD."""


def denylist_program(machine: str | None = None) -> bytes:
    """The filter as bytes for `bwrap --seccomp`: a foreign call convention ends the process, a denied call is EPERM.

    New namespaces are denied, too: clone with one of their bits is EPERM, and clone3, whose bits a filter cannot see, is
    ENOSYS, on which the C library falls back to clone.
    PreflightError for a machine without a table.
    """
    return _program(machine or platform.machine(), is_jail=False)


def jail_program(machine: str | None = None) -> bytes:
    """The filter of a judge: besides, no new process (threads may be), and no memory that no limit of a process counts."""
    return _program(machine or platform.machine(), is_jail=True)


def _program(machine: str, is_jail: bool) -> bytes:
    if machine not in _MACHINES:
        raise PreflightError(f"there is no system call filter for {machine}; use {', '.join(_MACHINES)}")
    arch, table = _MACHINES[machine]
    numbers = sorted({*table.values(), *(_JAIL[machine].values() if is_jail else ())})
    code = [_op(_LOAD, _ARCH_OFFSET), _op(_JUMP_EQUAL, arch, 1, 0), _op(_RETURN, _KILL)]
    code += [_op(_LOAD, _NUMBER_OFFSET)]
    if machine == "x86_64":
        code += [_op(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _KILL)]
    for number in numbers:
        code += [_op(_JUMP_EQUAL, number, 0, 1), _op(_RETURN, _REFUSE)]
    code += [_op(_JUMP_EQUAL, _CLONE3, 0, 1), _op(_RETURN, _MISSING)]
    code += [_op(_JUMP_EQUAL, _CLONE[machine], 1, 0), _op(_RETURN, _ALLOW)]
    code += [_op(_LOAD, _FIRST_ARGUMENT_OFFSET), _op(_JUMP_ANY_BIT, _NAMESPACE_BITS, 0, 1)]
    code += [_op(_RETURN, _REFUSE)]
    if is_jail:
        code += [_op(_JUMP_ANY_BIT, _THREAD_BIT, 1, 0), _op(_RETURN, _REFUSE)]
    code += [_op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
