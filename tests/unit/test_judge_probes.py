"""What WindowsAgentArena's getters make of pictures, libraries, archives and Windows' settings, made here by other programs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from sandbox_cluster.judge import parsers
from sandbox_cluster.judge.getter_probes import is_encrypted_with, night_light
from sandbox_cluster.judge.spec import parse
from slime_cua.core.errors import TaskError

XP_KEYWORDS, DESCRIPTION = 0x9C9E, 270
LIBRARY = """<?xml version="1.0" encoding="UTF-8"?>
<libraryDescription xmlns="http://schemas.microsoft.com/windows/2009/library">
  <isLibraryPinned>true</isLibraryPinned>
  <searchConnectorDescriptionList>
    <searchConnectorDescription><simpleLocation><url>C:\\Users\\Docker\\Downloads\\B</url></simpleLocation></searchConnectorDescription>
    <searchConnectorDescription><simpleLocation><url>C:\\Users\\Docker\\Downloads\\A</url></simpleLocation></searchConnectorDescription>
  </searchConnectorDescriptionList>
</libraryDescription>
"""


def test_a_librarys_folders_are_read_and_a_missing_or_broken_one_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(LIBRARY)
    (tmp_path / "b").write_text("<libraryDescription")
    wanted = ["C:\\Users\\Docker\\Downloads\\A", "C:\\Users\\Docker\\Downloads\\B"]
    assert parsers.library_folders(str(tmp_path / "a")) == wanted
    assert parsers.library_folders(str(tmp_path / "b")) is None
    assert parsers.library_folders(None) is None


def jpeg(path: Path, **tags: object) -> str:
    exif = Image.Exif()
    for name, value in tags.items():
        exif[{"keywords": XP_KEYWORDS, "description": DESCRIPTION}[name]] = value
    Image.new("RGB", (8, 8)).save(path, "JPEG", exif=exif)
    return str(path)


def test_a_tag_is_found_as_windows_and_as_others_write_it(tmp_path: Path) -> None:
    wide = "old;2023Vacation\0".encode("utf-16-le")
    assert parsers.has_tag(jpeg(tmp_path / "a.jpg", keywords=wide), "2023Vacation")
    assert parsers.has_tag(jpeg(tmp_path / "b.jpg", description="my 2023Vacation"), "2023Vacation")
    assert not parsers.has_tag(jpeg(tmp_path / "c.jpg", description="2022"), "2023Vacation")
    assert not parsers.has_tag(jpeg(tmp_path / "d.jpg"), "2023Vacation")
    (tmp_path / "e.jpg").write_bytes(b"\xff\xd8 no picture")
    assert not parsers.has_tag(str(tmp_path / "e.jpg"), "2023Vacation")
    assert not parsers.has_tag(None, "2023Vacation")


@pytest.mark.parametrize(
    ("outline", "fill", "right"),
    [((237, 28, 36), None, True), ((237, 28, 36), (237, 28, 36), False), ((0, 0, 255), None, False)],
)
def test_a_red_circle_is_an_outline_with_white_in_it(
    tmp_path: Path, outline: tuple[int, int, int], fill: tuple[int, int, int] | None, right: bool
) -> None:
    image = Image.new("RGB", (400, 300), "white")
    ImageDraw.Draw(image).ellipse((100, 50, 300, 250), outline=outline, fill=fill, width=3)
    image.save(tmp_path / "p.png")
    assert parsers.has_red_circle(str(tmp_path / "p.png")) is right


def test_no_picture_has_no_red_circle(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"no picture")
    assert not parsers.has_red_circle(str(tmp_path / "p.png"))
    assert not parsers.has_red_circle(None)


@pytest.mark.skipif(shutil.which("7z") is None, reason="7z is not installed")
def test_an_archive_that_7z_made_is_encrypted_or_not(tmp_path: Path) -> None:
    (tmp_path / "OldProjects").mkdir()
    (tmp_path / "OldProjects/example.txt").write_text("x")

    def listed(name: str, *password: str) -> str:
        subprocess.run(
            ["7z", "a", *password, name, "OldProjects"], cwd=tmp_path, check=True, capture_output=True
        )
        line = ["7z", "l", "-slt", *password, name]
        return subprocess.run(line, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert is_encrypted_with(listed("a.7z", "-p12345"), "OldProjects/example.txt")
    assert not is_encrypted_with(listed("b.7z"), "OldProjects/example.txt")
    assert not is_encrypted_with(listed("c.7z", "-p12345"), "Other/example.txt")


def test_an_archives_listing_is_read_with_windows_separators_and_line_ends() -> None:
    listed = "----------\nPath = OldProjects\nEncrypted = -\n\nPath = OldProjects\\example.txt\nSize = 3\nEncrypted = {}\n"
    assert is_encrypted_with(listed.format("+").replace("\n", "\r\n"), "OldProjects/example.txt")
    assert not is_encrypted_with(listed.format("-"), "OldProjects/example.txt")


def blob(is_on: bool, *times: tuple[int, int]) -> str:
    """The settings as Windows writes them (Bond compact binary): a mark, then a struct a time: field 20 and 30, in each an
    int8 field 0 for the hour and 1 for the minutes, left out at 0."""
    data = [0x43, 0x42, 1, 0, 0x0A, 2, 1, 0, 0x2A, 6, 1, 2, 3, 4, 5, 0x2A, 0x2B, 0x0E, 0x1D, 0x43, 0x42, 1, 0]
    data += [2, int(is_on)]
    for field, (hour, minute) in zip((0x14, 0x1E), times, strict=False):
        data += [0xCA, field, 0x0E, hour, *([0x2E, minute] if minute else []), 0]
    data += [0, 0] if times else [0xC2, 0x0A, 0, 0xCA, 0x14, 0x0E]
    return "\n".join(map(str, data))


@pytest.mark.parametrize(
    ("data", "right"),
    [
        (blob(True, (19, 0), (7, 0)), [True, "07:00 PM", "07:00 AM"]),
        (blob(True, (19, 30), (7, 15)), [True, "07:30 PM", "07:15 AM"]),
        (blob(True, (21, 0), (6, 45)), [True, "09:00 PM", "06:45 AM"]),
        (blob(True), [True]),
        (blob(False, (19, 0), (7, 0)), False),
        ("", False),
        ("1\n2\n3", False),
    ],
)
def test_the_night_lights_hours_are_read(data: str, right: object) -> None:
    assert night_light(data) == right


def test_every_probe_of_windows_agent_arena_loads_and_lacks_are_named() -> None:
    check = {"func": "exact_match", "expected": {"type": "rule", "rules": {"expected": "True"}}}
    parse({**check, "result": {"type": "check_if_timer_started", "hours": 0, "minutes": 30, "seconds": 0}})
    with pytest.raises(TaskError, match=r"check_if_timer_started\) lacks minutes, seconds"):
        parse({**check, "result": {"type": "check_if_timer_started", "hours": 0}})
