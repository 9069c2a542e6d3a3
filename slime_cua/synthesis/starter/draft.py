"""What a family makes of a random generator: a Draft. And the parts that drafts are built from.

Boxes are (x, y, width, height) in screen pixels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from slime_cua.core.actions import Action, GuiAction, TerminateAction
from slime_cua.core.coordinates import GRID, Point
from slime_cua.synthesis.starter.vocabulary import BACKGROUNDS, GRID_STEP, HINTS, SCREEN_WH_PX, TOP_PX

Box = tuple[int, int, int, int]

HOME = "/home/user"
HIDDEN = f"{HOME}/.starter"
STATE = f"{HIDDEN}/state.json"
APPS = "APPS"
"""Stands in drafts for the folder of the programs; the writer of task files puts the real one."""

SUCCESS = TerminateAction(status="success")
FAILURE = TerminateAction(status="failure")

_MARGIN_PX = 8
_GAP_PX = 16
_LATTICE_PX = 4


class Crowded(Exception):
    """No room was found for all boxes; the generator draws again."""


@dataclass(frozen=True)
class Draft:
    """An instance before it has an id and a split."""

    instruction: str
    key: tuple[Any, ...]
    """What a policy would recognise again: two instances with the same key are near-duplicates."""
    config: tuple[dict[str, Any], ...]
    evaluator: dict[str, Any]
    routes: dict[str, tuple[Action, ...]]
    """Name of a way (gui, hints, keys, bash, python) -> all actions of a solution."""
    wrong: tuple[Action, ...]
    """A plausible attempt that scores 0."""
    is_infeasible: bool = False
    related_apps: tuple[str, ...] = ("board",)


@dataclass(frozen=True)
class Thing:
    """Something on a board; `kind` says what a click on it does (see apps/board.py)."""

    id: str
    kind: str
    fill: str
    box: Box
    shape: str = "square"
    text: str = ""

    def spec(self, hint: str = "") -> dict[str, Any]:
        made: dict[str, Any] = {"id": self.id, "kind": self.kind, "fill": self.fill, "box": list(self.box)}
        if hint:
            made["hint"] = hint
        if self.shape != "square":
            made["shape"] = self.shape
        if self.text:
            made["text"] = self.text
        return made

    def key(self) -> tuple[Any, ...]:
        x, y, _, _ = self.box
        return (self.kind, self.shape, self.fill, x // 64, y // 64)


def named_by_place(box: Box) -> str:
    """An id that tells nothing but the place: the board writes ids down where programs of a policy can read them."""
    return f"{box[0]}-{box[1]}"


@dataclass(frozen=True)
class Window:
    """A window in front of the board; the last of several is on top."""

    id: str
    fill: str
    box: Box
    things: tuple[Thing, ...]


@dataclass
class Scene:
    """A board: what is on it, its windows, and the secret that its state file is signed with."""

    rng: Random
    things: list[Thing] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.secret = f"{self.rng.getrandbits(96):024x}"
        self.fill = self.rng.choice(BACKGROUNDS)
        letters = Random(f"hints {self.secret}").sample(HINTS, len(HINTS))
        self._letters, self._hints = iter(letters), dict[str, str]()

    def hint(self, thing: Thing) -> str:
        """The letter that `thing` carries on this board; none on what a click does nothing to."""
        if thing.kind == "look":
            return ""
        if thing.id not in self._hints:
            self._hints[thing.id] = next(self._letters)
        return self._hints[thing.id]

    def press_hints(self, *things: Thing) -> tuple[Action, ...]:
        """The keys that do what clicks on `things` in turn do."""
        return tuple(press_keys(self.hint(thing)) for thing in things)

    def key(self) -> tuple[Any, ...]:
        every = [*self.things, *(thing for window in self.windows for thing in window.things)]
        return tuple(sorted(thing.key() for thing in every))

    def config(self, files: dict[str, str] | None = None) -> tuple[dict[str, Any], ...]:
        """Set-up steps: put the program, its spec and `files`, start it; the last step ends when the board is drawn."""
        spec = {
            "screen": list(SCREEN_WH_PX),
            "state": STATE,
            "key": self.secret,
            "fill": self.fill,
            "things": [thing.spec(self.hint(thing)) for thing in self.things],
            **self.extra,
        }
        if self.windows:
            spec["windows"] = [
                {
                    "id": w.id,
                    "fill": w.fill,
                    "box": list(w.box),
                    "things": [t.spec(self.hint(t)) for t in w.things],
                }
                for w in self.windows
            ]
        program, spec_path = f"{HIDDEN}/board.py", f"{HIDDEN}/spec.json"
        put = put_files(
            {**(files or {}), spec_path: compact_json(spec)}, programs={program: f"{APPS}/board.py"}
        )
        return (put, execute(["/usr/bin/python3", "-I", "-S", program, spec_path]))


def compact_json(value: Any) -> str:
    """`value` as JSON without blanks."""
    return json.dumps(value, separators=(",", ":"))


def put_files(contents: dict[str, str], programs: dict[str, str] | None = None) -> dict[str, Any]:
    """The set-up step that writes `contents` (path on the desktop -> text) and copies `programs` (path -> local path)."""
    files = [{"path": path, "content": text} for path, text in contents.items()]
    files += [{"path": path, "local_path": local} for path, local in (programs or {}).items()]
    return {"type": "upload_file", "parameters": {"files": files}}


def execute(command: list[str]) -> dict[str, Any]:
    """The set-up step that runs `command` to its end and fails when it does."""
    return {"type": "execute", "parameters": {"command": command, "until": {"returncode": 0}}}


def place(
    rng: Random, sizes: Iterable[tuple[int, int]], area: Box | None = None, taken: Iterable[Box] = ()
) -> list[Box]:
    """Boxes of `sizes` at random places inside `area`, with a gap to each other and to `taken`. Raises Crowded."""
    width, height = SCREEN_WH_PX
    left, top, w, h = area or (_MARGIN_PX, TOP_PX + _MARGIN_PX, width - 2 * _MARGIN_PX, 0)
    h = h or height - top - _MARGIN_PX
    placed: list[Box] = []
    for box_w, box_h in sizes:
        for _ in range(60 if box_w <= w and box_h <= h else 0):
            x = left + rng.randrange(0, w - box_w + 1, _LATTICE_PX)
            y = top + rng.randrange(0, h - box_h + 1, _LATTICE_PX)
            box = (x, y, box_w, box_h)
            if not any(_touch(box, other) for other in [*placed, *taken]):
                placed.append(box)
                break
        else:
            raise Crowded(f"{len(placed)} boxes placed, no room for {box_w}x{box_h}")
    return placed


def sides(rng: Random, count: int, low: int = 64, high: int = 104) -> list[tuple[int, int]]:
    """`count` square sizes in pixels, multiples of 8."""
    return [(side, side) for side in (rng.randrange(low, high + 1, 8) for _ in range(count))]


def click(box: Box) -> GuiAction:
    """A left click on the middle of `box`, at the nearest demonstrated grid position."""
    x, y, w, h = box
    screen_w, screen_h = SCREEN_WH_PX
    return GuiAction(
        kind="left_click", point=Point(x=_snap(x + w / 2, screen_w), y=_snap(y + h / 2, screen_h))
    )


def type_text(text: str) -> GuiAction:
    return GuiAction(kind="type", text=text)


def press_keys(*keys: str) -> GuiAction:
    return GuiAction(kind="key", keys=keys)


def _snap(position_px: float, size_px: int) -> int:
    return int(position_px / size_px * GRID / GRID_STEP + 0.5) * GRID_STEP


def _touch(a: Box, b: Box) -> bool:
    return (
        a[0] < b[0] + b[2] + _GAP_PX
        and b[0] < a[0] + a[2] + _GAP_PX
        and a[1] < b[1] + b[3] + _GAP_PX
        and b[1] < a[1] + a[3] + _GAP_PX
    )
