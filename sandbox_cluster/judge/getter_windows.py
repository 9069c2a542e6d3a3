"""Getters of WindowsAgentArena that need only files and commands. They work on Linux desktops, too, with its folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sandbox_cluster.judge.scene import Argument, Scene

_HIDDEN = (
    "import os, sys; path = sys.argv[1]; found = os.stat(path); name = os.path.basename(path); "
    "print(int(name.startswith('.') or bool(getattr(found, 'st_file_attributes', 0) & 2)))"
)
_TITLE = "import pyautogui; print(pyautogui.getActiveWindowTitle())"


def _in_home(scene: Scene, *parts: str) -> str:
    """A path below HOME; parts that are absolute stay so."""
    separator = "\\" if scene.desktop.platform.is_windows else "/"
    return separator.join((scene.desktop.platform.home, *parts))


def _below(scene: Scene, folder: str, name: str) -> str:
    return folder.rstrip("\\/") + ("\\" if scene.desktop.platform.is_windows else "/") + name


async def _in_folder(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    path = _below(scene, getter["folder_name"], getter["file_name"])
    return {"value": await scene.read(path) is not None}


async def _on_desktop(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    return {"value": await scene.read(_in_home(scene, "Desktop", getter["file_name"])) is not None}


async def _is_on_desktop(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    is_there = await scene.read(_in_home(scene, "Desktop", getter["filename"])) is not None
    return {"value": "true" if is_there else "false"}


async def _is_saved(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    data = await scene.read(_in_home(scene, "Desktop", getter["filename"]))
    text = "" if data is None else _decoded(data)
    return {"value": "true" if data is not None and getter["textcontent"] in text else "false"}


def _decoded(data: bytes) -> str:
    """Text of a Windows editor: UTF-8, or UTF-16 with its mark."""
    is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")
    return data.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")


async def _folder_in_documents(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    tree = await _tree(scene, _in_home(scene, "Documents"))
    return {"value": getter["folder_name"] in _folders(tree)}


async def _moved_downloads(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """ "true" if folder and file are in OldDownloads, and no longer in Downloads."""
    old = _folders(await _tree(scene, _in_home(scene, "OldDownloads")))
    new = _folders(await _tree(scene, _in_home(scene, "Downloads")))
    folder, file = getter["folder_name"], getter["file_name"]
    is_moved = file in old.get(folder, ()) and file not in new.get(folder, ())
    return {"value": "true" if is_moved else "false"}


async def _has_size(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    path = getter["filepath"]
    size = await scene.parse("png_size", await scene.read(path), path)
    return {"value": size == [int(getter["width"]), int(getter["height"])]}


async def _docx_in_archive(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """ "true" if Archive holds nothing but .docx, at least one, and the folder itself has none left."""
    tree = await _tree(scene, getter["folder_path"])
    archived = _folders(tree).get("Archive", [])
    left = [child["name"] for child in tree.get("children", []) if child.get("type") == "file"]
    is_done = bool(archived) and all(map(_is_docx, archived)) and not any(map(_is_docx, left))
    return {"value": "true" if is_done else "false"}


def _is_docx(name: str) -> bool:
    return name.lower().endswith(".docx")


async def _png_names(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    """ "true" if the text file has the names of the folder's .png files, one a line."""
    data = await scene.read(getter["file_path"])
    tree = await _tree(scene, getter["folder_path"])
    names = {child["name"] for child in tree.get("children", []) if child["name"].lower().endswith(".png")}
    return {"value": "true" if data is not None and set(_decoded(data).splitlines()) == names else "false"}


async def _is_hidden(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    program = "python" if scene.desktop.platform.is_windows else "/usr/bin/python3"
    said = await scene.run([program, "-c", _HIDDEN, getter["file_path"]])
    return {"value": "true" if (said or "").strip() == "1" else "false"}


async def _title(scene: Scene, getter: Mapping[str, Any]) -> Argument:
    if scene.desktop.platform.is_windows:
        return {"value": (await scene.run(["python", "-c", _TITLE]) or "").strip()}
    return {"value": (await scene.run(["xdotool", "getactivewindow", "getwindowname"]) or "").strip()}


async def _tree(scene: Scene, path: str) -> Mapping[str, Any]:
    reply = await scene.ask("POST", "/list_directory", json={"path": path})
    return (reply.json().get("directory_tree") if reply.status_code == 200 else None) or {}


def _folders(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    """Folders at the top of a tree, each with the names in it."""
    return {
        child["name"]: [inner["name"] for inner in child.get("children", [])]
        for child in tree.get("children", [])
        if child.get("type") == "directory"
    }


FUNCTIONS = {
    "vm_file_exists_in_vm_folder": _in_folder,
    "vm_file_exists_in_desktop": _on_desktop,
    "is_file_desktop": _is_on_desktop,
    "is_file_saved_desktop": _is_saved,
    "vm_folder_exists_in_documents": _folder_in_documents,
    "is_files_moved_downloads": _moved_downloads,
    "vm_active_window_title": _title,
    "image_dimension_matches_input": _has_size,
    "is_all_docx_in_archive": _docx_in_archive,
    "all_png_file_names": _png_names,
    "is_file_hidden": _is_hidden,
}
