"""What a judge looks at, fetched from the desktop by the host: files' bytes, a command's output, what programs say.

A file that is not there is None, which a judge may score; a desktop that does not answer is an error, which nobody may.
Getter by getter as desktop-env 1.0.2 does it (`evaluators/getters`); what is otherwise is said where it is.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any

from sandbox_cluster.api import Settle
from sandbox_cluster.guest.pyautogui import compile_program
from sandbox_cluster.judge import (
    getter_browser,
    getter_chrome,
    getter_probes,
    getter_sites,
    getter_windows,
    relative_time,
)
from sandbox_cluster.judge.scene import Argument, Inputs, Scene
from sandbox_cluster.providers.base import VLC_PORT
from slime_cua.core.errors import TaskError

__all__ = ["FUNCTIONS", "Inputs", "Scene", "fetch"]

Getter = Callable[[Scene, Mapping[str, Any]], Awaitable[Argument]]
VIDEO_TYPES = (
    "3gp 3gpp 3gpp2 avi divx dv fli flv mp2t mp4 mp4v-es mpeg mpeg-system msvideo ogg quicktime vnd.divx vnd.mpegurl "
    "vnd.rn-realvideo webm x-anim x-avi x-flc x-fli x-flv x-m4v x-matroska x-mpeg x-mpeg-system x-mpeg2 x-ms-asf "
    "x-ms-wm x-ms-wmv x-ms-wmx x-ms-wvx x-msvideo x-nsv x-ogm x-ogm+ogg x-theora x-theora+ogg"
)
VLC_PASSWORD = "password"


async def fetch(scene: Scene, getter: Mapping[str, Any] | None) -> None:
    """Append what `getter` names to the scene's inputs. Raises SandboxError (desktop failed), TaskError (a bad getter),
    TimeoutError, JudgeError (a file could not be looked into)."""
    argument = {"value": None} if getter is None else await FUNCTIONS[getter["type"]](scene, getter)
    scene.inputs.arguments.append(argument)


async def _vm_file(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    async def read(path: str, dest: str) -> bytes | None:
        return await scene.read(path)

    return await _several(scene, getter, read)


async def _cloud_file(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """From an allowed URL, or from what set-up steps kept under the name `dest`."""

    async def read(path: str, dest: str) -> bytes | None:
        return scene.cache[dest] if dest in scene.cache else await scene.fetch(path, "cloud_file")

    return await _several(scene, getter, read)


async def _several(
    scene: Scene, getter: Mapping[str, Any], read: Callable[[str, str], Awaitable[bytes | None]]
) -> Argument:
    """One file, or with `multi` those that `gives` counts out. All are brought: judges find them beside each other."""
    if not getter.get("multi", False):
        name = _dest(getter, str(getter["path"]))
        return scene.file(name, await read(str(getter["path"]), name))
    paths, names = list(getter["path"]), list(getter["dest"])
    given = [
        scene.inputs.add_file(name, await read(path, name)) for path, name in zip(paths, names, strict=True)
    ]
    wanted = [given[index] for index in sorted(set(getter.get("gives", [0])))]
    return {"file": wanted[0]} if len(wanted) == 1 else {"files": wanted}


def _dest(getter: Mapping[str, Any], path: str) -> str:
    name = str(getter.get("dest") or path)
    if not getter.get("time_suffix"):
        return name
    moment = datetime.now(UTC).strftime(getter.get("time_format", "%Y%m%d_%H%M%S"))
    place = PurePosixPath(name)
    return f"{place.stem}_{moment}{place.suffix}"


async def _cache_file(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return scene.file(getter["path"], scene.cache.get(getter["path"]))


async def _content(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    if (getter["file_type"], getter["file_content"]) != ("xlsx", "last_row"):
        raise TaskError("content_from_vm_file takes file_type xlsx with file_content last_row")
    return {**scene.file(getter["path"], await scene.read(getter["path"])), "parse": "last_row"}


async def _command(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    is_shell = getter.get("shell", False) in (True, "true", "True")
    is_error = getter["type"] == "vm_command_error"
    return {"value": await scene.run(getter["command"], is_shell, is_error)}


async def _terminal(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": (await scene.ask("GET", "/terminal")).json().get("output")}


async def _accessibility(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": await getter_browser.tree(scene)}


async def _screen_size(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    width, height = scene.desktop.screen_wh_px
    return {"value": {"width": width, "height": height}}


async def _window_size(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    reply = await scene.ask("POST", "/window_size", data={"app_class_name": getter["app_class_name"]})
    return {"value": reply.json() if reply.status_code == 200 else None}


async def _wallpaper(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Desktops without a wallpaper give None, where OSWorld gives an empty file."""
    reply = await scene.ask("POST", "/wallpaper")
    data = reply.content if reply.status_code == 200 and reply.content else None
    return scene.file(getter.get("dest") or "wallpaper.png", data)


async def _directory(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    reply = await scene.ask("POST", "/list_directory", json={"path": getter["path"]})
    return {"value": reply.json().get("directory_tree") if reply.status_code == 200 else None}


async def _rule(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": getter["rules"]}


async def _relative_time(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": relative_time.resolve(getter["rules"], scene.now_s)}


async def _time_diff_range(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": getter["diff_range_in_minutes"]}


async def _vlc_playing(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """VLC's own status page; None when VLC does not answer."""
    data = await getter_browser.http_body(
        scene.desktop, VLC_PORT, "/requests/status.xml", ("", VLC_PASSWORD), scene.left_s()
    )
    return scene.file(getter.get("dest") or "status.xml", data)


async def _vlc_config(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    path = "AppData\\Roaming\\vlc\\vlcrc" if scene.desktop.platform.is_windows else "~/.config/vlc/vlcrc"
    return scene.file(getter.get("dest") or "vlcrc", await scene.read(path))


async def _video_player(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """The program that opens most kinds of video; one command asks for all."""
    command = f"for kind in {VIDEO_TYPES}; do xdg-mime query default video/$kind; done"
    lines = [line for line in (await scene.run(command, is_shell=True) or "").splitlines() if line]
    return {"value": Counter(lines).most_common(1)[0][0] if lines else "unknown"}


async def _gimp_config(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Of GIMP 2.10, or of whichever version's folder comes last."""
    listed = await scene.run("ls -1d ~/.config/GIMP/*", is_shell=True) or ""
    folders = ["~/.config/GIMP/2.10", *reversed(listed.split())]
    _, data = await scene.read_first([f"{folder}/{getter['file_name']}" for folder in folders])
    return scene.file(getter.get("dest") or getter["file_name"], data)


async def _vscode_config(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """VS Code writes the file when its command palette is told to."""
    keys = "import pyautogui\npyautogui.hotkey('ctrl', 'shift', 'p')\n"
    keys += f"pyautogui.typewrite({getter['vscode_extension_command']!r})\npyautogui.press('enter')"
    await scene.desktop.play(compile_program(keys), Settle(quiet_ms=500, max_ms=3000))
    return await _vm_file(scene, getter)


async def _slide_media(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    kind = "audio" if getter["type"] == "audio_in_slide" else "image"
    path, slide = getter["ppt_file_path"], int(getter["slide_index"])
    data = await scene.read(path)
    place = await scene.parse("slide_media", data, path, slide=slide, kind=kind)
    if not isinstance(place, dict):
        return {"file": None}
    if "outside" in place:
        return scene.file(getter.get("dest") or place["outside"], await scene.read(place["outside"]))
    return {**scene.file(path, data), "parse": "member", "with": {"name": place.get("inside", "")}}


async def _shortcuts(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Text of every shortcut on the desktop, by name."""
    is_windows = scene.desktop.platform.is_windows
    suffix = ".desktop" if not is_windows else ".url" if getter["type"].startswith("url") else ".lnk"
    folder = (await scene.ask("POST", "/desktop_path")).json()["desktop_path"]
    reply = await scene.ask("POST", "/list_directory", json={"path": folder})
    tree = reply.json().get("directory_tree") if reply.status_code == 200 else None
    found: dict[str, str] = {}
    for child in (tree or {}).get("children", []):
        if child["name"].endswith(suffix):
            data = await scene.read(f"{folder}{chr(92) if is_windows else '/'}{child['name']}")
            found[child["name"]] = (data or b"").decode(errors="replace")
    return {"value": json.loads(json.dumps(found))}


FUNCTIONS: dict[str, Getter] = {
    "vm_file": _vm_file,
    "cloud_file": _cloud_file,
    "cache_file": _cache_file,
    "content_from_vm_file": _content,
    "vm_command_line": _command,
    "vm_command_error": _command,
    "vm_terminal_output": _terminal,
    "accessibility_tree": _accessibility,
    "vm_screen_size": _screen_size,
    "vm_window_size": _window_size,
    "vm_wallpaper": _wallpaper,
    "list_directory": _directory,
    "rule": _rule,
    "rule_relativeTime": _relative_time,
    "time_diff_range": _time_diff_range,
    "vlc_playing_info": _vlc_playing,
    "vlc_config": _vlc_config,
    "default_video_player": _video_player,
    "gimp_config_file": _gimp_config,
    "vscode_config": _vscode_config,
    "audio_in_slide": _slide_media,
    "background_image_in_slide": _slide_media,
    "shortcuts_on_desktop": _shortcuts,
    "url_shortcuts_on_desktop": _shortcuts,
    **getter_chrome.FUNCTIONS,
    **getter_browser.FUNCTIONS,
    **getter_sites.FUNCTIONS,
    **getter_windows.FUNCTIONS,
    **getter_probes.FUNCTIONS,
}
"""Getter -> what fetches it; the same names as in kinds.GETTERS."""
