"""How a run that fails ends: a sentence for the person, the traceback in a file of the run."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slime_cua.core.errors import InfrastructureError, SlimeCuaError

FAILURE_LOG = "failure.log"


@contextmanager
def explained(logs: Path) -> Iterator[None]:
    """Every failure of the block leaves as an error of ours; its traceback is added to LOGS/failure.log."""
    try:
        yield
    except SlimeCuaError as error:
        _write(logs, error)
        raise
    except OSError as error:
        _write(logs, error)
        raise InfrastructureError(_of_the_system(error, logs)) from error
    except Exception as error:
        where = _write(logs, error)
        raise InfrastructureError(
            f"unexpected {_name(error)}: {_last_line(error)}; the traceback is in {where}; "
            "the same command continues the run once the cause is gone"
        ) from error


def disk_sentence(error: OSError, path: str | Path) -> str:
    """What a full disk means for the person at the terminal."""
    file = error.filename or path
    return f"no space is left to write {file} ({error.strerror}): free some, then the same command continues the run"


def is_disk_full(error: BaseException) -> bool:
    """The disk, the quota or the file size limit is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _of_the_system(error: OSError, logs: Path) -> str:
    if is_disk_full(error):
        return disk_sentence(error, logs.parent)
    return f"{type(error).__name__}: {error}; the traceback is in {logs / FAILURE_LOG}"


def _name(error: BaseException) -> str:
    cause = getattr(error, "cause", None)
    return type(cause if isinstance(cause, BaseException) else error).__name__


def _last_line(error: BaseException) -> str:
    """Foreign errors of other processes carry whole tracebacks as text: the last line is the sentence."""
    cause = getattr(error, "cause", None)
    lines = str(cause if isinstance(cause, BaseException) else error).strip().splitlines()
    return lines[-1].strip()[:400] if lines else "no message"


def _write(logs: Path, error: BaseException) -> Path:
    path = logs / FAILURE_LOG
    text = "".join(traceback.format_exception(error))
    with suppress(OSError), path.open("a") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}\n")
    return path
