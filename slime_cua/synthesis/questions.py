"""Questions about generated screens, and texts without a screen, both with certain answers.

Plain short text: "point red circle: 480 260". Positions are the middle of a thing on the 0..1000 grid, rounded to steps of
`vocabulary.GRID_STEP`: x, a separator, y. No word here is part of an action's grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from slime_cua.core.coordinates import GRID
from slime_cua.synthesis.canvas import Box
from slime_cua.synthesis.screens import SCREEN_WH_PX, Screen
from slime_cua.synthesis.starter import vocabulary
from slime_cua.synthesis.things import HUES, WORDS, Item, pick

QuestionKind = Literal[
    "point_color",
    "point_shape",
    "point_both",
    "point_place",
    "point_size",
    "point_word",
    "point_box",
    "point_close",
    "point_pointer",
    "tell_color",
    "tell_shape",
    "tell_word",
    "word_at",
    "value",
    "count",
    "theme",
    "there",
    "ticked",
    "absent",
]
KINDS: tuple[QuestionKind, ...] = get_args(QuestionKind)
POINT_KINDS = tuple(kind for kind in KINDS if kind.startswith("point_"))

MARGIN_PX = 28
"""A thing is the left one only if it is this much further left than the next."""


@dataclass(frozen=True)
class Question:
    """A question, e.g. Question("point_color", "red", "480 260", box=(280, 80, 340, 120))."""

    kind: QuestionKind
    about: str
    """What is asked for, without the opening."""
    answer: str
    box: Box | None = None
    """What a point must hit, pixels; None where no point is asked for."""

    @property
    def phrase(self) -> str:
        """What is asked for as a part of a sentence, e.g. "the color of the left one"."""
        if self.kind in ("tell_color", "tell_shape", "tell_word"):
            return f"the {self.kind.removeprefix('tell_')} of the {self.about}"
        before = {"count": "the number of ", "value": "the text beside ", "word_at": "the word at "}
        return before.get(self.kind, "the ") + self.about

    def opening(self, rng: np.random.Generator | None = None) -> str:
        """The question as text, ending with ": "; plain wording without `rng`, else a random one."""
        forms: tuple[str, ...]
        if self.kind in POINT_KINDS or self.kind == "absent":
            forms = ("point {}: ", "point to the {}: ", "where is the {}: ", "where is {}: ")
        elif self.kind in ("tell_color", "tell_shape", "tell_word"):
            noun = {"tell_color": "color", "tell_shape": "shape", "tell_word": "word"}[self.kind]
            forms = (f"what {noun} is the {{}}: ", f"{noun} of {{}}: ", f"{noun} of the {{}}: ")
        elif self.kind == "word_at":
            forms = ("word at {}: ", "what is at {}: ")
        elif self.kind == "value":
            forms = ("text beside {}: ", "what is beside {}: ")
        elif self.kind == "count":
            forms = ("how many {}: ", "count {}: ", "number of {}: ")
        elif self.kind == "there":
            forms = ("is there {}: ", "is there a {}: ")
        elif self.kind == "ticked":
            forms = ("is the {} ticked: ",)
        else:
            forms = ("which {}: ", "{}: ")
        return (forms[0] if rng is None else pick(rng, forms)).format(self.about)


def grid_text(x_px: float, y_px: float, separator: str = " ") -> str:
    """The point as text, e.g. "480 260"."""
    step = vocabulary.GRID_STEP
    x, y = (
        round(part / size * GRID / step) * step for part, size in zip((x_px, y_px), SCREEN_WH_PX, strict=True)
    )
    return f"{x}{separator}{y}"


def candidates(screen: Screen, kind: QuestionKind) -> list[Question]:
    """Every question of `kind` that has exactly one right answer on `screen`."""
    return list(_MAKERS[kind](screen))


def ask(
    screen: Screen,
    rng: np.random.Generator,
    weights: dict[QuestionKind, float],
    num: int,
    known: dict[QuestionKind, list[Question]] | None = None,
) -> list[Question]:
    """Up to `num` questions, kinds drawn by `weights`; none comes twice, and a place already told seldom does.

    known: candidates of this screen that were found before, by kind; new ones are added.
    """
    kinds = [kind for kind, weight in weights.items() if weight > 0]
    shares = np.cumsum([weights[kind] for kind in kinds])
    known = {} if known is None else known
    questions: list[Question] = []
    for _ in range(5 * num):
        if len(questions) == num:
            break
        kind = kinds[int(np.searchsorted(shares, rng.random() * shares[-1], side="right"))]
        if kind not in known:
            known[kind] = candidates(screen, kind)
        if not known[kind]:
            continue
        question = pick(rng, tuple(known[kind]))
        is_told = question.box is not None and any(other.box == question.box for other in questions)
        if question not in questions and not (is_told and rng.random() < 0.8):
            questions.append(question)
    return questions


def _point(kind: QuestionKind, about: str, box: Box) -> Question:
    return Question(kind, about, grid_text((box[0] + box[2]) / 2, (box[1] + box[3]) / 2), box)


def _only(items: list[Item], test: Callable[[Item], bool]) -> Item | None:
    found = [item for item in items if test(item)]
    return found[0] if len(found) == 1 else None


def _by_color(screen: Screen) -> Iterator[tuple[str, Item]]:
    """Things whose colour no other has. White counts only without boxes and fields, which are white, too."""
    has_white = any(item.kind in ("box", "field") for item in screen.items)
    has_black = any(window.close[1] > window.box[1] + 2 for window in screen.windows)
    for color in (*HUES, *vocabulary.CONTROL_COLOURS):
        if (color == "white" and has_white) or (color == "black" and has_black):
            continue
        item = _only(screen.items, lambda item, color=color: item.color == color)  # type: ignore[misc]
        if item:
            yield color, item


def _by_kind(screen: Screen) -> Iterator[tuple[str, Item]]:
    for kind in ("button", "circle", "square", "triangle", "cross", "box", "field"):
        item = _only(screen.items, lambda item, kind=kind: item.kind == kind)  # type: ignore[misc]
        if item and not (kind == "square" and any(other.kind in ("button", "box") for other in screen.items)):
            yield kind, item


def _by_both(screen: Screen) -> Iterator[tuple[str, Item]]:
    """Colour and kind together name one thing, and at least one of them alone does not."""
    for item in screen.items:
        same_color = sum(other.color == item.color for other in screen.items)
        same_kind = sum(other.kind == item.kind for other in screen.items)
        same_both = sum(other.color == item.color and other.kind == item.kind for other in screen.items)
        if item.color and same_both == 1 and max(same_color, same_kind) > 1:
            yield f"{item.color} {item.kind}", item


def _by_place(screen: Screen) -> Iterator[tuple[str, Item]]:
    groups: list[tuple[str, list[Item]]] = [("one", screen.items)]
    groups += [(kind, [i for i in screen.items if i.kind == kind]) for kind in ("button", "box", "field")]
    groups += [(f"{color} one", [i for i in screen.items if i.color == color]) for color in HUES]
    for name, items in groups:
        if len(items) < 2:
            continue
        for place, axis, sign in (("left", 0, 1), ("right", 0, -1), ("top", 1, 1), ("bottom", 1, -1)):
            ranked = sorted(items, key=lambda item: sign * item.center[axis])
            if abs(ranked[1].center[axis] - ranked[0].center[axis]) >= MARGIN_PX:
                yield f"{place} {name}", ranked[0]


def _by_size(screen: Screen) -> Iterator[tuple[str, Item]]:
    groups: list[tuple[str, list[Item]]] = [("one", screen.items)]
    groups += [(f"{color} one", [i for i in screen.items if i.color == color]) for color in HUES]
    groups += [(kind, [i for i in screen.items if i.kind == kind]) for kind in ("button", *vocabulary.SHAPES)]
    for name, items in groups:
        if len(items) < 2:
            continue
        ranked = sorted(items, key=lambda item: item.area)
        if ranked[1].area > 1.6 * ranked[0].area:
            yield f"small {name}", ranked[0]
        if ranked[-1].area > 1.6 * ranked[-2].area:
            yield f"big {name}", ranked[-1]


def _by_word(screen: Screen) -> Iterator[tuple[str, Item]]:
    for word in WORDS:
        item = _only(screen.items, lambda item, word=word: item.word == word)  # type: ignore[misc]
        if item:
            yield word, item


def _word_at(screen: Screen) -> Iterator[Question]:
    for item in screen.items:
        if item.word:
            x0, y0, x1, y1 = item.box
            yield Question("word_at", grid_text((x0 + x1) / 2, (y0 + y1) / 2), item.word)


def _value(screen: Screen) -> Iterator[Question]:
    labels = [item.label for item in screen.items]
    for item in screen.items:
        if item.label and item.word and labels.count(item.label) == 1:
            yield Question("value", item.label, item.word)


def _absent(screen: Screen) -> Iterator[Question]:
    """A colour or a shape that the screen does not show."""
    shown = {item.color for item in screen.items} | {window.color for window in screen.windows}
    kinds = {item.kind for item in screen.items}
    yield from (Question("absent", f"{color} one", "none") for color in HUES if color not in shown)
    if not kinds & {"button", "box"}:
        yield from (Question("absent", shape, "none") for shape in vocabulary.SHAPES if shape not in kinds)


def _named(screen: Screen) -> Iterator[tuple[str, Item]]:
    """Things by anything but their word."""
    yield from ((f"{name} one", item) for name, item in _by_color(screen))
    yield from _by_kind(screen)
    yield from _by_place(screen)
    yield from _by_size(screen)


def _point_close(screen: Screen) -> Iterator[Question]:
    if screen.windows and not any(item.word == "close" for item in screen.items):
        yield _point("point_close", "close", screen.windows[-1].close)


def _point_box(screen: Screen) -> Iterator[Question]:
    for name, state in (("ticked box", True), ("empty box", False)):
        item = _only(screen.items, lambda item, state=state: item.kind == "box" and item.is_ticked == state)  # type: ignore[misc]
        if item and sum(other.kind == "box" for other in screen.items) > 1:
            yield _point("point_box", name, item.box)


def _point_pointer(screen: Screen) -> Iterator[Question]:
    if screen.pointer:
        x, y = screen.pointer
        yield Question("point_pointer", "pointer", grid_text(x + 5, y + 8), (x - 16, y - 16, x + 28, y + 32))


def _count(screen: Screen) -> Iterator[Question]:
    counts = {f"{color} one": sum(item.color == color for item in screen.items) for color in HUES}
    for name in (*vocabulary.SHAPES, "button", "box", "field"):
        if name != "square" or not any(item.kind in ("button", "box") for item in screen.items):
            counts[name] = sum(item.kind == name for item in screen.items)
    some = [name for name, count in counts.items() if count]
    none = [name for name, count in counts.items() if not count]
    turn = len(screen.items) % max(len(none), 1)
    yield from (Question("count", name, str(counts[name])) for name in some)
    yield from (Question("count", name, "0") for name in (none[turn:] + none[:turn])[: len(some)])


def _there(screen: Screen) -> Iterator[Question]:
    shown = {item.color for item in screen.items}
    pairs = {(item.color, item.kind) for item in screen.items}
    windows = {window.color for window in screen.windows}
    present = [color for color in HUES if color in shown]
    absent = [color for color in HUES if color not in shown | windows]
    half = [
        f"{color} {kind}" for color in present for kind in vocabulary.SHAPES if (color, kind) not in pairs
    ]
    whole = [
        f"{color} {kind}" for color, kind in sorted(pairs) if color in HUES and kind in vocabulary.SHAPES
    ]
    num = min(len(present), len(absent))
    yield from (Question("there", f"{color} one", "yes") for color in present[:num])
    yield from (Question("there", f"{color} one", "no") for color in absent[:num])
    num = min(len(half), len(whole))
    yield from (Question("there", about, "yes") for about in whole[:num])
    yield from (Question("there", about, "no") for about in half[-num:] if num)


def _ticked(screen: Screen) -> Iterator[Question]:
    boxes = [item for item in screen.items if item.kind == "box"]
    if len(boxes) == 1:
        yield Question("ticked", "box", "yes" if boxes[0].is_ticked else "no")
    for about, item in _by_place(screen):
        if about.endswith(" box"):
            yield Question("ticked", about, "yes" if item.is_ticked else "no")


_MAKERS: dict[QuestionKind, Callable[[Screen], Iterator[Question]]] = {
    "point_color": lambda s: (_point("point_color", f"{name} one", i.box) for name, i in _by_color(s)),
    "point_shape": lambda s: (_point("point_shape", name, i.box) for name, i in _by_kind(s)),
    "point_both": lambda s: (_point("point_both", name, i.box) for name, i in _by_both(s)),
    "point_place": lambda s: (_point("point_place", name, i.box) for name, i in _by_place(s)),
    "point_size": lambda s: (_point("point_size", name, i.box) for name, i in _by_size(s)),
    "point_word": lambda s: (_point("point_word", f"word {name}", i.box) for name, i in _by_word(s)),
    "point_box": _point_box,
    "point_close": _point_close,
    "point_pointer": _point_pointer,
    "tell_color": lambda s: (
        Question("tell_color", name, i.color)
        for name, i in [*_by_kind(s), *_by_place(s), *_by_size(s)]
        if i.color and not any(color in name for color in HUES)
    ),
    "tell_shape": lambda s: (
        Question("tell_shape", name, i.kind)
        for name, i in [*((f"{n} one", i) for n, i in _by_color(s)), *_by_place(s)]
        if not name.endswith(("button", "box", "field"))
    ),
    "tell_word": lambda s: (Question("tell_word", name, i.word) for name, i in _named(s) if i.word),
    "word_at": _word_at,
    "value": _value,
    "count": _count,
    "theme": lambda s: iter([Question("theme", "theme", "dark" if s.is_dark else "light")]),
    "there": _there,
    "ticked": _ticked,
    "absent": _absent,
}
