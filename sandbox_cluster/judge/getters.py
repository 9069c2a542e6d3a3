"""What a judge looks at, fetched from the desktop by the host: files' bytes or a command's output.

A file that is not there is None, which a judge may score; a desktop that does not answer is an error, which nobody may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from sandbox_cluster.providers.desktop import Desktop
from slime_cua.core.errors import TaskError

MAX_FILE_BYTES = 64 << 20


@dataclass
class Inputs:
    """Arguments of one judge as its job writes them, and the files they name."""

    files: dict[str, bytes] = field(default_factory=dict)
    arguments: list[dict[str, Any]] = field(default_factory=list)

    def add_file(self, path: str, data: bytes | None) -> str | None:
        """The path inside the jail; the name keeps its suffix, which libraries look at."""
        if data is None:
            return None
        name = f"{len(self.files)}/{PurePosixPath(path).name or 'file'}"
        self.files[name] = data
        return f"/job/in/{name}"


async def fetch(
    desktop: Desktop,
    getter: Mapping[str, Any] | None,
    inputs: Inputs,
    cache: Mapping[str, bytes],
    timeout_s: float,
) -> None:
    """Append what `getter` names to `inputs`. Raises SandboxError (desktop failed), TaskError (a bad getter)."""
    if getter is None:
        inputs.arguments.append({"value": None})
        return
    kind = getter["type"]
    if kind == "rule":
        inputs.arguments.append({"value": getter["rules"]})
    elif kind == "vm_screen_size":
        width, height = desktop.screen_wh_px
        inputs.arguments.append({"value": {"width": width, "height": height}})
    elif kind == "cache_file":
        inputs.arguments.append({"file": inputs.add_file(getter["path"], cache.get(getter["path"]))})
    elif kind == "vm_file":
        await _files(desktop, getter, inputs)
    else:
        inputs.arguments.append({"value": await _command(desktop, getter, timeout_s)})


async def _files(desktop: Desktop, getter: Mapping[str, Any], inputs: Inputs) -> None:
    path, names = getter["path"], getter.get("dest")
    if not getter.get("multi", False):
        data = await read(desktop, path)
        inputs.arguments.append({"file": inputs.add_file(names if isinstance(names, str) else path, data)})
        return
    paths = [path] if isinstance(path, str) else list(path)
    found = [inputs.add_file(one, await read(desktop, one)) for one in paths]
    given = [found[index] for index in getter.get("gives", [0])]
    inputs.arguments.append({"files": given} if len(given) > 1 else {"file": given[0]})


async def read(desktop: Desktop, path: str) -> bytes | None:
    """The file's bytes; None when there is none, it is no regular file or the desktop's user may not read it."""
    try:
        return await desktop.get_file(path, MAX_FILE_BYTES)
    except OSError:
        return None
    except ValueError as error:
        raise TaskError(f"getter path {path!r}: {error}") from None


async def _command(desktop: Desktop, getter: Mapping[str, Any], timeout_s: float) -> str | None:
    command, is_shell = getter["command"], getter.get("shell", False) in (True, "true", "True")
    try:
        reply = await desktop.run(command, is_shell, timeout_s=timeout_s)
    except OSError:
        return None
    except ValueError as error:
        raise TaskError(f"getter command {command!r}: {error}") from None
    if reply.is_timeout:
        raise TimeoutError(f"the command of a getter did not end within {timeout_s:.1f} s: {command!r}")
    return reply.stderr if getter["type"] == "vm_command_error" else reply.stdout
