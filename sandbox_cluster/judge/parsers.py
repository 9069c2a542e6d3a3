"""What the jail makes of files that a desktop gave: the host itself reads none of them. Standard library only, no import of ours.

Each takes a file's path, or None when there was none, and gives a JSON value, or the path of a file that it wrote to /tmp. A
file that cannot be read gives what OSWorld's getter gives then: None, or the program's default.
"""

from __future__ import annotations

import json
import posixpath
import sqlite3
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

BROKEN = (OSError, ValueError, TypeError, AttributeError, KeyError, IndexError)
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}embed"
EDGE_ENGINES = {"01": "Bing", "02": "Yahoo!", "03": "Google", "92": "DuckDuckGo", "15": "Yandex"}
EDGE_DATA = (
    *("browsing_history", "cache", "cookies", "download_history"),
    *("form_data", "passwords", "site_settings"),
)
_ADDRESS_BAR = "Address and search bar"


def setting(path: str | None, keys: list[str], default: Any = None) -> Any:
    """The value at `keys` of a JSON file of settings; `default` when it is not there."""
    try:
        value = json.loads(Path(str(path)).read_text())
        for key in keys:
            value = value[key]
    except BROKEN:
        return default
    return value


def is_set(path: str | None, keys: list[list[str]], default: str = "false") -> str:
    """ "true" if any of these settings is true, else "false"; `default` when the file cannot be read."""
    if setting(path, []) is None:
        return default
    return "true" if any(setting(path, one) for one in keys) else "false"


def has_site_settings(path: str | None) -> str:
    """Whether Chrome has own settings for what sites keep; "Google" for an unreadable file."""
    if setting(path, ["profile"]) is None:
        return "Google"
    return "false" if setting(path, ["profile", "default_content_setting_values"]) is None else "true"


def opens_new_tab(path: str | None) -> str:
    """Does Chrome start with a new tab? "Google" for an unreadable file."""
    if setting(path, []) is None:
        return "Google"
    session = setting(path, ["session"])
    return "true" if session is None or setting(path, ["session", "restore_on_startup"]) == 5 else "false"


def extensions(path: str | None, key: str) -> Any:
    """`path`, or a name in the manifest, of every extension; "Google" for an unreadable file."""
    if setting(path, []) is None:
        return "Google"
    found = setting(path, ["extensions", "settings"], {})
    if key == "path":
        return [one["path"] for one in found.values() if isinstance(one, dict) and "path" in one]
    return [one["manifest"]["name"] for one in found.values() if "name" in setting_of(one, "manifest")]


def setting_of(one: Any, key: str) -> dict[str, Any]:
    """A mapping inside a mapping, or an empty one."""
    value = one.get(key) if isinstance(one, dict) else None
    return value if isinstance(value, dict) else {}


def as_number(path: str | None, keys: list[str]) -> float:
    """1.0 if the setting is true."""
    return 1.0 if setting(path, keys) else 0.0


def edge_engine(path: str | None) -> str:
    """Name of Edge's search engine, of the five that WindowsAgentArena knows by number."""
    guid = str(setting(path, ["default_search_provider", "synced_guid"], ""))
    return EDGE_ENGINES.get(guid.removeprefix("485bf7d3-0215-45af-87dc-5388680000"), "Unknown")


def edge_deletes_on_exit(path: str | None) -> float:
    """1.0 if Edge deletes everything but hosted apps' data at exit."""
    wanted = dict.fromkeys(EDGE_DATA, True) | {"hosted_apps_data": False}
    return float(setting(path, ["browser", "clear_data_on_exit"]) == wanted)


def edge_text(path: str | None, keys: list[str], is_bare: bool = False) -> str:
    """A text setting, `is_bare`: without scheme and slashes; "False" when empty, "error" for an unreadable file."""
    if setting(path, []) is None:
        return "error"
    text = str(setting(path, keys) or "")
    if is_bare:
        text = text.replace("https://", "").replace("http://", "").replace("/", "")
    return text or "False"


def rows(path: str | None, query: str) -> list[list[Any]] | None:
    """Rows of an SQLite file (Chrome's History, Cookies); bytes as Latin-1 text. None when it cannot be read."""
    if path is None:
        return None
    try:
        with sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True) as base:
            found = base.execute(query).fetchall()
    except sqlite3.Error:
        return None
    return [[cell.decode("latin-1") if isinstance(cell, bytes) else cell for cell in row] for row in found]


def address_bar(path: str | None, applications: list[str]) -> str | None:
    """The text of the browser's address bar in an accessibility tree; None without one."""
    try:
        root = ElementTree.fromstring(Path(str(path)).read_text())
    except (*BROKEN, ElementTree.ParseError):
        return None
    found = [
        entry.text
        for application in root.iter("application")
        if application.get("name") in applications
        for entry in application.iter("entry")
        if entry.get("name") == _ADDRESS_BAR
    ]
    return found[0] if found and found[-1] else None


def last_row(path: str | None) -> list[str] | None:
    """The last row of a workbook's first sheet, as texts."""
    if path is None:
        return None
    import pandas

    return [str(cell) for cell in pandas.read_excel(path).iloc[-1].astype(str).tolist()]


def slide_media(path: str | None, slide: int, kind: str) -> dict[str, str] | None:
    """Where the first "audio" of a slide, or its background "image", is: {"inside": member} or {"outside": path on the desktop}."""
    try:
        with zipfile.ZipFile(str(path)) as archive:
            wanted = _background(archive, slide) if kind == "image" else None
            if kind == "image" and wanted is None:
                return None
            relations = ElementTree.fromstring(archive.read(f"ppt/slides/_rels/slide{slide + 1}.xml.rels"))
    except (*BROKEN, zipfile.BadZipFile, ElementTree.ParseError):
        return None
    for relation in relations:
        if kind in relation.get("Type", "") and wanted in (None, relation.get("Id")):
            target = relation.get("Target", "")
            if target.startswith("file://"):
                return {"outside": target[len("file://") :]}
            return {"inside": posixpath.normpath(posixpath.join("ppt/slides", target))}
    return None


def _background(archive: zipfile.ZipFile, slide: int) -> str | None:
    root = ElementTree.fromstring(archive.read(f"ppt/slides/slide{slide + 1}.xml"))
    for part in root.iter():
        if part.tag.endswith("}bgPr"):
            for image in part.iter():
                if image.tag.endswith("}blip") and image.get(_RELATION):
                    return image.get(_RELATION)
    return None


def png_size(path: str | None) -> list[int] | None:
    """Width and height in a PNG's header."""
    try:
        head = Path(str(path)).read_bytes()[:24]
    except OSError:
        return None
    if len(head) < 24 or head[:8] != b"\x89PNG\r\n\x1a\n":
        return None
    return [int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")]


def library_folders(path: str | None) -> list[str] | None:
    """Folders of a Windows library (.library-ms), sorted."""
    space = "{http://schemas.microsoft.com/windows/2009/library}"
    place = f"{space}searchConnectorDescriptionList/{space}searchConnectorDescription/{space}simpleLocation/{space}url"
    try:
        root = ElementTree.parse(str(path)).getroot()
    except (*BROKEN, ElementTree.ParseError):
        return None
    return sorted(folder.text or "" for folder in root.findall(place))


def has_tag(path: str | None, tag: str) -> bool:
    """Is `tag` part of any value in the picture's EXIF data? Windows writes tags as UTF-16 bytes."""
    from PIL import Image

    try:
        with Image.open(str(path)) as image:
            exif = image.getexif()
            values = [*exif.values(), *exif.get_ifd(0x8769).values()]
    except (*BROKEN, SyntaxError):
        return False
    return any(tag in _exif_text(value) for value in values)


def _exif_text(value: Any) -> str:
    if isinstance(value, tuple):
        is_bytes = all(isinstance(one, int) and 0 <= one < 256 for one in value)
        return _exif_text(bytes(value)) if is_bytes else " ".join(map(_exif_text, value))
    return value.decode("utf-16-le", errors="ignore") if isinstance(value, bytes) else str(value)


def has_red_circle(path: str | None) -> bool:
    """Is the square around the picture's red pixels, at their mean distance from their middle, white to more than 80 %?"""
    import numpy
    from PIL import Image

    try:
        with Image.open(str(path)) as image:
            pixels = numpy.asarray(image.convert("RGB"))
    except (*BROKEN, SyntaxError):
        return False
    is_red = (pixels[..., 0] >= 150) & (pixels[..., 1:] <= 100).all(axis=-1)
    rows, columns = numpy.nonzero(is_red)
    if not rows.size:
        return False
    row, column = rows.mean(), columns.mean()
    radius = int(numpy.hypot(rows - row, columns - column).mean())
    top, left = max(0, int(row - radius)), max(0, int(column - radius))
    square = pixels[top : int(row + radius), left : int(column + radius)]
    return bool(square.size) and bool((square >= 200).all(axis=-1).mean() > 0.8)


def member(path: str | None, name: str) -> str | None:
    """A member of a ZIP archive, unpacked."""
    try:
        with zipfile.ZipFile(str(path)) as archive:
            data = archive.read(name)
    except (*BROKEN, zipfile.BadZipFile):
        return None
    place = f"/tmp/{posixpath.basename(name)}"
    Path(place).write_bytes(data)
    return place


def same(value: Any) -> Any:
    """`value`: for a job that wants nothing but what a parser made of a file."""
    return value
