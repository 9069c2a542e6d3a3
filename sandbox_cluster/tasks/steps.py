"""Set-up steps of OSWorld and WindowsAgentArena tasks: which this build has, what they take, their check when a task is loaded."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_cua.core.errors import TaskError

STEPS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "launch": (frozenset({"command"}), frozenset({"shell"})),
    "execute": (frozenset({"command"}), frozenset({"shell", "stdout", "stderr", "until"})),
    "command": (frozenset({"command"}), frozenset({"shell", "stdout", "stderr", "until"})),
    "sleep": (frozenset({"seconds"}), frozenset()),
    "upload_file": (frozenset({"files"}), frozenset()),
    "download": (frozenset({"files"}), frozenset()),
    "open": (frozenset({"path"}), frozenset()),
    "activate_window": (frozenset({"window_name"}), frozenset({"strict", "by_class"})),
    "close_window": (frozenset({"window_name"}), frozenset({"strict", "by_class"})),
    "change_wallpaper": (frozenset({"path"}), frozenset()),
    "execute_with_verification": (
        frozenset({"command"}),
        frozenset({"shell", "verification", "max_wait_time", "check_interval"}),
    ),
    "chrome_open_tabs": (frozenset({"urls_to_open"}), frozenset()),
    "chrome_close_tabs": (frozenset({"urls_to_close"}), frozenset()),
    "edge_open_tabs": (frozenset({"urls_to_open"}), frozenset()),
    "update_browse_history": (frozenset({"history"}), frozenset()),
    "update_browse_history_edge": (frozenset({"history"}), frozenset()),
    "create_folder": (frozenset({"path"}), frozenset()),
    "create_file": (frozenset({"path"}), frozenset({"content"})),
    "recycle_file": (frozenset({"path"}), frozenset()),
}
"""Step type -> parameters it must have, parameters it may have."""
_ACCOUNT = "it needs a Google account"
_NOT_OSWORLDS = "OSWorld's own client does not have it, either"
REFUSED_STEPS: dict[str, str] = {
    "googledrive": _ACCOUNT,
    "login": _ACCOUNT,
    "proxy": "it needs a paid proxy; give the desktop a route out, or leave the task out",
    "replay": _NOT_OSWORLDS,
    "act": _NOT_OSWORLDS,
    "tidy_desktop": _NOT_OSWORLDS,
    "close_all": "desktops are fresh, nothing is open",
}
"""Step type -> why this build does not have it."""
MAX_INLINE_BYTES = 64 << 20


def check_steps(steps: Any, where: str, allowed_urls: tuple[str, ...] | None = None) -> None:
    """Raises TaskError naming the step and the field for anything that could not be run. `allowed_urls`: beginnings of
    URLs that downloads may have; None leaves that to the desktop's host, which has its own list."""
    if not isinstance(steps, list | tuple):
        raise TaskError(f"{where} must be a list of steps")
    for index, step in enumerate(steps):
        check_step(step, f"{where}[{index}]", allowed_urls)


def check_step(step: Any, where: str, allowed_urls: tuple[str, ...] | None = None) -> None:
    if not isinstance(step, Mapping) or not isinstance(step.get("type"), str):
        raise TaskError(f'{where} must be {{"type": ..., "parameters": {{...}}}}')
    kind, parameters = step["type"], step.get("parameters", {})
    if kind in REFUSED_STEPS:
        raise TaskError(f"{where}.type {kind!r} is not in this build: {REFUSED_STEPS[kind]}")
    if kind not in STEPS:
        raise TaskError(f"{where}.type {kind!r} is unknown; this build has {', '.join(sorted(STEPS))}")
    if not isinstance(parameters, Mapping):
        raise TaskError(f"{where}.parameters must be a mapping")
    must, may = STEPS[kind]
    for name in sorted(must - set(parameters)):
        raise TaskError(f"{where}.parameters.{name} is missing: {kind} needs it")
    for name in sorted(set(parameters) - must - may):
        raise TaskError(f"{where}.parameters.{name} is unknown: {kind} takes {', '.join(sorted(must | may))}")
    _check_values(kind, parameters, f"{where}.parameters", allowed_urls)


def _check_values(
    kind: str, parameters: Mapping[str, Any], where: str, allowed_urls: tuple[str, ...] | None
) -> None:
    if "command" in parameters and not _is_command(parameters["command"]):
        raise TaskError(f"{where}.command must be a text or a list of texts that is not empty")
    if "until" in parameters and not set(parameters["until"] or {}) <= {"returncode", "stdout", "stderr"}:
        raise TaskError(f"{where}.until takes returncode, stdout or stderr")
    if kind == "sleep":
        seconds = parameters["seconds"]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= 3600:
            raise TaskError(f"{where}.seconds = {seconds!r} must be a number from 0 to 3600")
    for name in ("urls_to_open", "urls_to_close"):
        if name in parameters and not _are_texts(parameters[name]):
            raise TaskError(f"{where}.{name} must be a list of URLs")
    for index, item in enumerate(parameters.get("history", ())):
        if not isinstance(item, Mapping) or not {"url", "title", "visit_time_from_now_in_seconds"} <= set(
            item
        ):
            raise TaskError(f"{where}.history[{index}] needs url, title and visit_time_from_now_in_seconds")
    for index, file in enumerate(parameters.get("files", ())):
        _check_file(kind, file, f"{where}.files[{index}]", allowed_urls)
    for name in ("path", "window_name"):
        if name in parameters and not isinstance(parameters[name], str):
            raise TaskError(f"{where}.{name} must be a text")


def _check_file(kind: str, file: Any, where: str, allowed_urls: tuple[str, ...] | None) -> None:
    if not isinstance(file, Mapping) or not isinstance(file.get("path"), str):
        raise TaskError(f"{where}.path is missing: where the file goes on the desktop")
    if kind == "download":
        url = str(file.get("url", ""))
        if not url.startswith(("http://", "https://")):
            raise TaskError(f"{where}.url {url!r} must begin with https:// or http://")
        if allowed_urls is not None and not any(url.startswith(prefix) for prefix in allowed_urls):
            raise TaskError(
                f"{where}.url {url!r} is not allowed: add its beginning to the list of allowed URLs, "
                "or bring the file by upload_file"
            )
        return
    sources = {"content", "content_base64", "local_path"} & set(file)
    if len(sources) != 1:
        raise TaskError(f"{where} needs exactly one of content, content_base64, local_path")


def _is_command(command: Any) -> bool:
    if isinstance(command, str):
        return bool(command.strip())
    return _are_texts(command) and bool(command)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)


def resolve_files(step: dict[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """`step` with its local paths made absolute. Raises TaskError for a file that is not there."""
    if step["type"] != "upload_file":
        return step
    files = []
    for index, file in enumerate(step["parameters"]["files"]):
        file = dict(file)
        if "local_path" in file:
            path = (folder / file["local_path"]).resolve()
            if not path.is_file():
                raise TaskError(f"{where}.parameters.files[{index}].local_path: there is no file {path}")
            file["local_path"] = str(path)
        files.append(file)
    return {**step, "parameters": {**step["parameters"], "files": files}}


def inline_files(step: dict[str, Any]) -> dict[str, Any]:
    """`step` with the bytes of its local files inside: the desktop host does not see the caller's disk."""
    if step.get("type") != "upload_file":
        return step
    files = []
    for file in step["parameters"]["files"]:
        file = dict(file)
        if "local_path" in file:
            path = Path(file.pop("local_path"))
            try:
                data = path.read_bytes()
            except OSError as error:
                raise TaskError(f"upload_file: {path} cannot be read: {error.strerror}") from None
            if len(data) > MAX_INLINE_BYTES:
                raise TaskError(f"upload_file: {path} has {len(data)} bytes, more than {MAX_INLINE_BYTES}")
            file["content_base64"] = base64.b64encode(data).decode()
        files.append(file)
    return {**step, "parameters": {**step["parameters"], "files": files}}


def file_bytes(file: Mapping[str, Any], where: str) -> bytes:
    """The bytes of one upload_file entry. Raises TaskError when they are not inside."""
    if "content" in file:
        return str(file["content"]).encode()
    if "content_base64" not in file:
        raise TaskError(f"{where}: local files must be made inline by the client before they are sent")
    try:
        return base64.b64decode(file["content_base64"], validate=True)
    except binascii.Error as error:
        raise TaskError(f"{where}.content_base64 is not base64: {error}") from None
