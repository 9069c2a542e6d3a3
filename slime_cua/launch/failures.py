"""How a run that fails ends: a sentence for the person, the traceback in a file of the run."""

from __future__ import annotations

import errno
import shutil
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_cua.core.errors import InfrastructureError, SlimeCuaError
from slime_cua.launch.preflight import LEAST_BYTES

FAILURE_LOG = "failure.log"


@contextmanager
def explained(logs: Path) -> Iterator[None]:
    """Every failure of the block leaves as an error of ours; its traceback is added to LOGS/failure.log."""
    try:
        yield
    except SlimeCuaError as error:
        _write(logs, error)
        if "space is left" not in str(error) and shutil.disk_usage(logs).free < LEAST_BYTES:
            raise InfrastructureError(disk_sentence(error, logs.parent)) from error
        raise
    except Exception as error:
        where = _write(logs, error)
        cause = cause_of(error)
        if is_disk_full(cause):
            raise InfrastructureError(disk_sentence(cause, logs.parent)) from error
        raise InfrastructureError(
            f"unexpected {type(cause).__name__}: {_last_line(cause)}; the traceback is in {where}; "
            "the same command continues the run once the cause is gone"
        ) from error


def disk_sentence(error: BaseException, path: str | Path) -> str:
    """What a full disk means for the person at the terminal."""
    file = getattr(error, "filename", None) or path
    return f"no space is left to write {file} ({error}): free some, then the same command continues the run"


def is_disk_full(error: BaseException) -> bool:
    """The disk, the quota or the file size limit is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cause_of(error: BaseException) -> BaseException:
    """The error that another process raised, where `error` came from one (Ray's errors hold it as `cause`)."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _last_line(error: BaseException) -> str:
    """Foreign errors of other processes carry whole tracebacks as text: the last line is the sentence."""
    lines = str(error).strip().splitlines()
    return lines[-1].strip()[:400] if lines else "no message"


def _write(logs: Path, error: BaseException) -> Path:
    path = logs / FAILURE_LOG
    text = "".join(traceback.format_exception(error))
    with suppress(OSError), path.open("a") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")
    return path
