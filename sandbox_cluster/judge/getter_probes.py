"""Getters of WindowsAgentArena that ask its server's own probes, Windows' registry by PowerShell, or 7-Zip.

Probes: 200 is yes, 400 and 500 are no, as that project's client takes them: its server answers 500 when there is no window
to look at. A server without the probe (OSWorld's) gives no score. What is read of files is read in the jail.
Source: WindowsAgentArena, `desktop_env/evaluators/getters` (settings, fileexplorer, windows_clock, microsoftpaint, misc).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from sandbox_cluster.judge.scene import Argument, Scene
from slime_cua.core.errors import JudgeError

Getter = Callable[[Scene, Mapping[str, Any]], Awaitable[Argument]]
IMAGES = (".jpg", ".jpeg", ".tiff")
ZIPPED = "OldProjects/example.txt"
SEVEN_ZIP = (r"C:\Program Files\7-Zip\7z.exe", "7z")
_SETTINGS = r"HKCU:\Software\Microsoft\Windows\CurrentVersion"
_NIGHT_LIGHT = "windows.data.bluelightreduction.settings"
_STORAGE_SENSE = rf"{_SETTINGS}\StorageSense\Parameters\StoragePolicy"
NO_SCHEDULE = 202
"""Stands where the first hour would, in what Windows keeps of its night light."""


def _probe(path: str, fields: tuple[str, ...], yes: Any, no: Any) -> Getter:
    """A getter that hands `fields` to the probe at `path`; `folder_path` is called `path` there."""

    async def ask(scene: Scene, getter: Mapping[str, Any]) -> Argument:
        body = {name.removeprefix("folder_"): getter[name] for name in fields}
        return {"value": yes if (await _answer(scene, path, body)).status_code == 200 else no}

    return ask


async def _answer(scene: Scene, path: str, body: Mapping[str, Any]) -> httpx.Response:
    reply = await scene.ask("POST", path, json=body)
    if reply.status_code not in (200, 400, 500):
        raise JudgeError(
            f"the desktop's control server has no probe {path} (it answered {reply.status_code}): "
            "only WindowsAgentArena's server has it"
        )
    return reply


async def _library(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Folders of a library, sorted; None when there is no such library."""
    name = f"{getter['library_name']}.library-ms"
    data = await scene.read(f"AppData\\Roaming\\Microsoft\\Windows\\Libraries\\{name}")
    return {**scene.file(name, data), "parse": "library_folders"}


async def _tagged(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Has every picture of the folder the tag in its EXIF data? A folder without pictures has not."""
    reply = await scene.ask("POST", "/list_directory", json={"path": getter["directory"]})
    tree = (reply.json().get("directory_tree") if reply.status_code == 200 else None) or {}
    names = [child["name"] for child in tree.get("children", []) if child["name"].lower().endswith(IMAGES)]
    separator = "\\" if scene.desktop.platform.is_windows else "/"
    for name in names:
        data = await scene.read(f"{getter['directory']}{separator}{name}")
        if not await scene.parse("has_tag", data, name, tag=str(getter["tag"])):
            return {"value": False}
    return {"value": bool(names)}


async def _red_circle(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    data = await scene.read(getter["filepath"])
    return {"value": bool(await scene.parse("has_red_circle", data, getter["filepath"]))}


async def _zipped(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """ "true" if the archive holds ZIPPED, is encrypted, and the password opens it. 7-Zip on the desktop reads it."""
    path = getter["filename"]
    program = SEVEN_ZIP[0] if scene.desktop.platform.is_windows else SEVEN_ZIP[1]
    listed = await scene.run([program, "l", "-slt", f"-p{getter['password']}", path])
    if listed is None:
        raise JudgeError(f"the desktop has no {program}: 7-Zip reads the archive there")
    tested = await scene.run([program, "t", f"-p{getter['password']}", path])
    is_right = "Everything is Ok" in (tested or "") and is_encrypted_with(listed, ZIPPED)
    return {"value": "true" if is_right else "false"}


def is_encrypted_with(listed: str, name: str) -> bool:
    """Is `name` in the archive that `7z l -slt` listed, and anything in it encrypted? (An empty file never is.)"""
    entries = [
        dict(line.partition(" = ")[::2] for line in entry.splitlines())
        for entry in listed.replace("\r", "").split("\n\n")
    ]
    names = {entry.get("Path", "").replace("\\", "/") for entry in entries}
    return name in names and any(entry.get("Encrypted") == "+" for entry in entries)


async def _power_shell(scene: Scene, script: str) -> str:
    """What a PowerShell command prints; empty when it failed, as for a key that is not there."""
    if not scene.desktop.platform.is_windows:
        raise JudgeError("this getter reads Windows' settings: the task needs a Windows desktop")
    said = await scene.run(["powershell", "-NoProfile", "-NonInteractive", "-Command", script])
    if said is None:
        raise JudgeError("PowerShell cannot be started on the desktop")
    return said.replace("\r", "").strip()


async def _registry(scene: Scene, path: str, name: str) -> str:
    return await _power_shell(scene, f"Get-ItemPropertyValue -Path '{path}' -Name '{name}'")


async def _background(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """ "True" if there is no picture behind the icons."""
    return {"value": str(await _registry(scene, r"HKCU:\Control Panel\Desktop", "WallPaper") == "")}


async def _notifications(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """ "True" if notifications are off."""
    return {"value": str(await _registry(scene, rf"{_SETTINGS}\PushNotifications", "ToastEnabled") == "0")}


async def _storage_sense(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """Days between two runs, as text; None when it is off."""
    if await _registry(scene, _STORAGE_SENSE, "01") != "1":
        return {"value": None}
    days = await _registry(scene, _STORAGE_SENSE, "2048")
    return {"value": days.splitlines()[0] if days else None}


async def _night_light(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    key = rf"{_SETTINGS}\CloudStore\Store\DefaultAccount\Current\default${_NIGHT_LIGHT}\{_NIGHT_LIGHT}"
    return {"value": night_light(await _registry(scene, key, "Data"))}


def night_light(data: str) -> bool | list[Any]:
    """[True, start, end] ("07:00 PM") with a schedule, [True] without; False when it is off or was never touched.

    `data`: the bytes, a number a line. Byte 24 says on; hours and minutes follow from 28, each minute behind a mark that is
    0 at the full hour; the end comes five bytes after the start, seven when the start has minutes.
    """
    values = [int(line) for line in data.split() if line.isdigit()]
    if len(values) < 29 or values[24] != 1:
        return False
    if values[28] == NO_SCHEDULE:
        return [True]
    values += [0] * 12
    start_minute = values[30] if values[29] else 0
    at = 35 if start_minute else 33
    end_minute = values[at + 2] if values[at + 1] else 0
    return [True, _clock(values[28], start_minute), _clock(values[at], end_minute)]


def _clock(hour: int, minute: int) -> str:
    """Noon is "00:00 PM", as WindowsAgentArena writes it."""
    return f"{hour % 12:02d}:{minute:02d} {'AM' if hour < 12 else 'PM'}"


async def _timezone(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    zone = _json(await _power_shell(scene, "Get-TimeZone | Select-Object DisplayName | ConvertTo-Json"))
    name = zone.get("DisplayName") if isinstance(zone, dict) else None
    return {"value": name or "Unable to get time zone"}


async def _installed_web_app(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    packages = _json(await _power_shell(scene, "Get-AppxPackage | Select-Object Name | ConvertTo-Json"))
    packages = packages if isinstance(packages, list) else [packages]
    names = [str(one.get("Name", "")).lower() for one in packages if isinstance(one, dict)]
    is_there = any("pwabuilder" in name for name in names)
    return {"value": "app_installed" if is_there else "app_not_installed"}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


FUNCTIONS: dict[str, Getter] = {
    "is_details_view": _probe("/is_details_view", ("folder_path",), True, False),
    "are_files_sorted_by_modified_time": _probe(
        "/are_files_sorted_by_modified_time", ("directory",), True, False
    ),
    "is_directory_read_only_for_user": _probe(
        "/is_directory_read_only_for_user", ("directory", "user"), True, False
    ),
    "check_if_timer_started": _probe(
        "/check_if_timer_started", ("hours", "minutes", "seconds"), "True", "False"
    ),
    "check_if_world_clock_exists": _probe(
        "/check_if_world_clock_exists", ("city", "country"), "True", "False"
    ),
    "vm_library_folders": _library,
    "are_all_images_tagged": _tagged,
    "is_red_circle_present_on_canvas": _red_circle,
    "zipped_folder_in_desktop": _zipped,
    "desktop_background": _background,
    "system_notifications": _notifications,
    "storage_sense_run_frequency": _storage_sense,
    "night_light_state": _night_light,
    "system_timezone": _timezone,
    "validate_pwa_installed": _installed_web_app,
}
