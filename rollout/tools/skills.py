"""A frozen library of skills: how a thing is done, as text and as a picture, found by what the policy asks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from rollout.actions import McpTool
from rollout.tools.results import cut_text
from rollout.tools.retrieval import retrieve, words_of
from rollout.tools.sources import named
from slime_cua.config.rollout import ActionSpaceConfig
from slime_cua.core.actions import SkillAction
from slime_cua.core.errors import ConfigError
from slime_cua.data.images import png_size_px

FILE = "skills.jsonl"
NOTHING_ASKED = "[nothing was looked up]"
NOTHING_FOUND = "[no skill fits]"


@dataclass(frozen=True)
class Skill:
    """One entry of the library."""

    name: str
    text: str
    png: bytes | None = None


@dataclass(frozen=True)
class Found:
    """What the policy is shown of a look-up."""

    text: str
    png: bytes | None = None


class SkillLibrary(Protocol):
    """Answers a look-up; never changes a desktop. Called from a thread."""

    def look_up(self, action: SkillAction) -> Found:
        """What fits the query, as the action's route asks: text, picture, both, or nothing (DIRECT)."""
        ...


class SkillFolder:
    """`FOLDER/skills.jsonl`, a skill a line: {"name": ..., "text": ..., "image": "file of FOLDER, optional"}; BM25 finds.

    Read whole when it is made: what is asked later is answered from what was there at the start of the run.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError, with file and line, for a library that is not there, empty or misshapen."""
        path = folder / FILE
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"action_space.skill_library = {str(folder)!r}: {error}") from error
        read = [_skill(f"{path}, line {n}", line, folder) for n, line in enumerate(lines, 1) if line.strip()]
        if not read:
            raise ConfigError(f"action_space.skill_library: {path} holds no skill")
        self._skills = {skill.name: skill for skill in read}
        if len(self._skills) != len(read):
            raise ConfigError(f"{path}: two skills have the same name")
        self._index: Sequence[McpTool] = [McpTool(skill.name, skill.text) for skill in read]

    def look_up(self, action: SkillAction) -> Found:
        if action.route == "DIRECT" or not action.query.strip():
            return Found(NOTHING_ASKED)
        skill = self._skills[retrieve(self._index, action.query, 1)[0].name]
        if not {*words_of(action.query)} & {*words_of(f"{skill.name} {skill.text}")}:
            return Found(NOTHING_FOUND)
        png = skill.png if action.route in ("QUERY_IMAGE", "QUERY_BOTH") else None
        if action.route == "QUERY_IMAGE":
            return Found(skill.name if png is not None else NOTHING_FOUND, png)
        return Found(cut_text(f"{skill.name}: {skill.text}"), png)


def skill_library(config: ActionSpaceConfig) -> SkillLibrary | None:
    """The library that the config names; None where the space has no skills. `module:Name` is called with the config."""
    if "skill" not in config.actions:
        return None
    if ":" in config.skill_library:
        return cast(
            SkillLibrary, named(config.skill_library, "action_space.skill_library", "a folder")(config)
        )
    return SkillFolder(Path(config.skill_library))


def _skill(where: str, line: str, folder: Path) -> Skill:
    try:
        entry: dict[str, Any] = json.loads(line)
        unknown = entry.keys() - {"name", "text", "image"}
        if unknown:
            raise ValueError(f"unknown key {min(unknown)!r}")
        name, text, image = entry["name"], entry["text"], entry.get("image")
        if not (isinstance(name, str) and isinstance(text, str) and name and text):
            raise ValueError("name and text must be texts that are not empty")
        png = (folder / image).read_bytes() if image is not None else None
        if png is not None:
            png_size_px(png)
        return Skill(name, text, png)
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{where}: {error!r}") from error
