"""Host users for desktops: one each, never an account's, never one that another provider on this machine uses now."""

from __future__ import annotations

import contextlib
import pwd
import socket
from dataclasses import dataclass

from slime_cua.core.errors import SandboxError

STRIDE = 1000
NUM_TRIES = 20


@dataclass
class UserClaim:
    """A host user id held by this process until release() or its death."""

    uid: int
    _mark: socket.socket

    def release(self) -> None:
        self._mark.close()


def claim_user(preferred_uid: int) -> UserClaim:
    """`preferred_uid`, or the first free one of it + 1000, + 2000, ... SandboxError when all are taken.

    A claim is a bound socket name without a file: the kernel lets one process have it and frees it when that one dies.
    """
    for uid in range(preferred_uid, preferred_uid + NUM_TRIES * STRIDE, STRIDE):
        with contextlib.suppress(KeyError):
            pwd.getpwuid(uid)
            continue
        mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            mark.bind(f"\0slime_cua/desktop-user/{uid}")
        except OSError:
            mark.close()
            continue
        return UserClaim(uid, mark)
    raise SandboxError(
        f"no free host user among {preferred_uid}, {preferred_uid + STRIDE}, ... ({NUM_TRIES} tried); "
        "set first_uid to a range that no account has"
    )
