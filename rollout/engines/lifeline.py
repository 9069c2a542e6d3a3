"""Run a command that ends when this process' standard input closes: `python -m rollout.engines.lifeline -- CMD ...`.

The parent keeps the other end of the pipe; however the parent ends, the pipe closes, and the command's process group is
terminated. If this process is killed itself, the kernel kills the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1
_TERM_S = 5.0


def main(arguments: list[str]) -> int:
    """Returns the command's exit code."""
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        print("usage: python -m rollout.engines.lifeline -- COMMAND ...", file=sys.stderr)
        return 2
    libc = ctypes.CDLL(None)
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _signal_group(child.pid, signal.SIGTERM))
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)
    return code if code >= 0 else 128 - code


def _watch(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    _signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_TERM_S)
    _signal_group(child.pid, signal.SIGKILL)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
