"""Families solved by looking and clicking: press, missing, place, boxes, dialog."""

from __future__ import annotations

from random import Random

from slime_cua.core.actions import Action
from slime_cua.synthesis.starter import judges
from slime_cua.synthesis.starter.draft import (
    FAILURE,
    SUCCESS,
    Box,
    Crowded,
    Draft,
    Scene,
    Thing,
    Window,
    click,
    named_by_place,
    place,
    sides,
)
from slime_cua.synthesis.starter.vocabulary import ANSWERS, COLOURS, CONTROL_COLOURS, PLACES, SHAPES, SIZES

BLACK, WHITE = CONTROL_COLOURS["black"], CONTROL_COLOURS["white"]


def coloured(rng: Random, names: list[str], kind: str = "press", area: Box | None = None) -> list[Thing]:
    """Square things, one of each colour name, at random places."""
    boxes = place(rng, sides(rng, len(names)), area)
    return [Thing(name, kind, COLOURS[name], box) for name, box in zip(names, boxes, strict=True)]


def press(rng: Random) -> Draft:
    """Press the thing of a named colour or shape, or of both, among one to six."""
    asked = rng.choice(("colour", "colour", "shape", "both"))
    scene, target, instruction = _asked_scene(rng, asked, rng.randint(1 if asked == "colour" else 2, 6))
    return _press_draft(scene, instruction, target)


def missing(rng: Random) -> Draft:
    """The same words as `press`; in half of the instances nothing on the board is meant by them."""
    asked = rng.choice(("colour", "shape"))
    scene, target, instruction = _asked_scene(rng, asked, rng.randint(2, 4))
    if rng.random() < 0.5:
        return _press_draft(scene, instruction, target)
    scene.things = [
        thing
        for thing in scene.things
        if (thing.fill != target.fill if asked == "colour" else thing.shape != target.shape)
    ]
    if not scene.things:
        raise Crowded("nothing is left on the board")
    return Draft(
        instruction,
        (instruction, *scene.key()),
        scene.config(),
        judges.infeasible(),
        {"gui": (FAILURE,)},
        (click(scene.things[0].box), SUCCESS),
        is_infeasible=True,
    )


def place_family(rng: Random) -> Draft:
    """Equal things; the left, right, top, bottom, big or small one is meant."""
    word = rng.choice(PLACES + SIZES)
    count = rng.randint(2, 4)
    low, high = (64, 112) if word == "small" else (112, 64)
    lengths = [low, *[high] * (count - 1)] if word in SIZES else [rng.choice((64, 80, 96))] * count
    boxes = place(rng, [(length, length) for length in lengths])
    if word in PLACES:
        axis, sign = {"left": (0, 1), "right": (0, -1), "top": (1, 1), "bottom": (1, -1)}[word]
        boxes.sort(key=lambda box: sign * box[axis])
        if abs(boxes[0][axis] - boxes[1][axis]) < 64:
            raise Crowded("it is not clear which one is meant")
    colour = rng.choice(list(COLOURS.values()))
    shape = rng.choice(("square", "circle"))
    scene = Scene(rng)
    scene.things = [Thing(named_by_place(box), "press", colour, box, shape) for box in boxes]
    return _press_draft(scene, f"press the {word} button.", scene.things[0])


def boxes(rng: Random) -> Draft:
    """Tick the boxes of one or two colours, then press done."""
    names = rng.sample(list(COLOURS), rng.randint(2, 5))
    wanted = names[: rng.randint(1, min(2, len(names) - 1))]
    places = place(rng, [(112, 64), *sides(rng, len(names), 64, 88)])
    scene = Scene(rng)
    done = Thing("done", "done", BLACK, places[0], text="done")
    ticks = [Thing(name, "box", COLOURS[name], box) for name, box in zip(names, places[1:], strict=True)]
    scene.things = [done, *ticks]
    instruction = f"tick {' and '.join(wanted)}, then press done."
    solution: tuple[Action, ...] = (
        *(click(tick.box) for tick in ticks[: len(wanted)]),
        click(done.box),
        SUCCESS,
    )
    wrong = (click(ticks[-1].box), click(done.box), SUCCESS)
    evaluator = judges.state_judge(scene.secret, judges.handed_in(wanted, {}))
    hints = (*scene.press_hints(*ticks[: len(wanted)], done), SUCCESS)
    routes = {"gui": solution, "hints": hints}
    return Draft(instruction, (instruction, *scene.key()), scene.config(), evaluator, routes, wrong)


def dialog(rng: Random) -> Draft:
    """Something is in front: a window to close, a question to answer, another window over the one that is meant."""
    return rng.choice((_close, _answer, _behind))(rng)


def _close(rng: Random) -> Draft:
    scene, target, box = _covered(rng)
    closer = Thing("close", "close", BLACK, place(rng, [(72, 72)], _inside(box))[0])
    scene.windows = [Window("front", WHITE, box, (closer,))]
    instruction = f"close the window, then press the {target.id} button."
    rule = judges.pressed([target.id], [["close", "close"]])
    return _two_step(scene, instruction, [closer, target], rule, (click(closer.box), SUCCESS))


def _answer(rng: Random) -> Draft:
    scene, target, box = _covered(rng)
    spots = place(rng, [(80, 80), (80, 80)], _inside(box))
    yes = Thing("yes", "answer", WHITE, spots[0], "circle")
    no = Thing("no", "answer", WHITE, spots[1], "cross")
    scene.windows = [Window("front", "#c9c9c9", box, (yes, no))]
    said, other = (yes, no) if rng.choice(ANSWERS) == "yes" else (no, yes)
    instruction = f"answer {said.id}, then press the {target.id} button."
    rule = judges.pressed([target.id], [["answer", said.id]])
    wrong = (click(other.box), click(target.box), SUCCESS)
    return _two_step(scene, instruction, [said, target], rule, wrong)


def _behind(rng: Random) -> Draft:
    """Two coloured windows, each with a button of the same colour; the one behind has its button covered."""
    ground, front, button = rng.sample(list(COLOURS), 3)
    is_left_behind = rng.random() < 0.5
    y, lower = rng.randrange(64, 81, 4), rng.randrange(92, 121, 4)
    left = (rng.randrange(16, 49, 4), y, 320, 240)
    right = (rng.randrange(256, 297, 4), lower, 320, 240)
    back_box, front_box = (left, right) if is_left_behind else (right, left)
    x0, x1 = right[0] + 8, left[0] + left[2] - 8
    overlap = (x0, lower + 8, max(x1 - x0, 0), y + 240 - lower - 16)
    if overlap[2] < 64:
        raise Crowded("the windows hardly overlap")
    covered = place(rng, [(64, 64)], overlap)[0]
    shown = place(rng, [(64, 64)], _inside(front_box), taken=[covered])[0]
    behind = Thing("behind", "press", COLOURS[button], covered)
    before = Thing("before", "press", COLOURS[button], shown)
    scene = Scene(rng)
    scene.windows = [
        Window("back", COLOURS[ground], back_box, (behind,)),
        Window("front", COLOURS[front], front_box, (before,)),
    ]
    if rng.random() < 0.3:
        instruction = f"press the {button} button in the {front} window."
        return _press_draft(scene, instruction, before, click(behind.box))
    instruction = f"press the {button} button in the {ground} window."
    visible = (left[0] + 16, y + 80, right[0] - left[0] - 32, 80)
    if not is_left_behind:
        visible = (left[0] + 336, lower + 80, right[0] - left[0] - 32, 80)
    raise_it = Thing("raise", "", "", visible)
    wrong = (click(shown), SUCCESS)
    return _two_step(scene, instruction, [raise_it, behind], judges.pressed(["behind"]), wrong)


def _covered(rng: Random) -> tuple[Scene, Thing, Box]:
    """A board whose coloured buttons all lie under a window of the returned box."""
    box = (rng.randrange(80, 153, 4), rng.randrange(72, 101, 4), 400, 256)
    names = rng.sample(list(COLOURS), rng.randint(2, 3))
    scene = Scene(rng)
    scene.things = coloured(rng, names, area=_inside(box))
    return scene, scene.things[0], box


def _inside(box: Box) -> Box:
    x, y, w, h = box
    return (x + 12, y + 12, w - 24, h - 24)


def _two_step(
    scene: Scene, instruction: str, clicks: list[Thing], rule: str, wrong: tuple[Action, ...]
) -> Draft:
    """Clicks in turn solve it; where all of them are on things that show a hint, so do the keys."""
    routes: dict[str, tuple[Action, ...]] = {"gui": (*(click(thing.box) for thing in clicks), SUCCESS)}
    if all(thing.kind for thing in clicks):
        routes["hints"] = (*scene.press_hints(*clicks), SUCCESS)
    evaluator = judges.state_judge(scene.secret, rule)
    return Draft(instruction, (instruction, *scene.key()), scene.config(), evaluator, routes, wrong)


def _asked_scene(rng: Random, asked: str, count: int) -> tuple[Scene, Thing, str]:
    """A board of `count` things, the first of which alone has the colour, the shape or both of the instruction."""
    colours, shapes = list(COLOURS), list(SHAPES)
    colour, shape = rng.choice(colours), rng.choice(shapes)
    others: list[tuple[str, str]] = []
    while len(others) < count - 1:
        other = (rng.choice(colours), rng.choice(shapes))
        is_same = {"colour": other[0] == colour, "shape": other[1] == shape, "both": other == (colour, shape)}
        if not is_same[asked]:
            others.append(other)
    if asked == "both" and len(others) > 1:
        others[0] = (colour, rng.choice([name for name in shapes if name != shape]))
        others[1] = (rng.choice([name for name in colours if name != colour]), shape)
    spots = place(rng, sides(rng, count))
    scene = Scene(rng)
    scene.things = [
        Thing(named_by_place(box), "press", COLOURS[c], box, s)
        for (c, s), box in zip([(colour, shape), *others], spots, strict=True)
    ]
    words = {"colour": f"{colour} button", "shape": shape, "both": f"{colour} {shape}"}[asked]
    return scene, scene.things[0], f"press the {words}."


def _press_draft(scene: Scene, instruction: str, target: Thing, miss: Action | None = None) -> Draft:
    """One press of `target` solves it; `miss`, or else another thing or nothing at all, is the wrong attempt."""
    others = [thing for thing in scene.things if thing is not target]
    if miss is None and others:
        miss = click(others[0].box)
    wrong = (miss, SUCCESS) if miss is not None else (SUCCESS,)
    return Draft(
        instruction,
        (instruction, *scene.key()),
        scene.config(),
        judges.state_judge(scene.secret, judges.pressed([target.id])),
        {"gui": (click(target.box), SUCCESS), "hints": (*scene.press_hints(target), SUCCESS)},
        wrong,
    )
