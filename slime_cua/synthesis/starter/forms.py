"""Families with a keyboard or two ways to the end: entry, editor, theme."""

from __future__ import annotations

from random import Random

from slime_cua.core.actions import Action
from slime_cua.synthesis.starter import judges
from slime_cua.synthesis.starter.draft import (
    APPS,
    HIDDEN,
    HOME,
    SUCCESS,
    Draft,
    Scene,
    Thing,
    click,
    execute,
    place,
    press_keys,
    put_files,
    sides,
    type_text,
)
from slime_cua.synthesis.starter.programs import bash_write
from slime_cua.synthesis.starter.screens import BLACK, WHITE
from slime_cua.synthesis.starter.vocabulary import COLOURS, FILES, THEMES, WORDS


def entry(rng: Random) -> Draft:
    """Type a word in the only field, or in the one with a rim of the named colour, then press ok (or enter)."""
    word = rng.choice(WORDS)
    names = rng.sample(list(COLOURS), rng.choice((1, 2, 2, 3)))
    spots = place(rng, [*[(208, 72)] * len(names), (96, 64)])
    scene = Scene(rng)
    fields = [Thing(name, "field", COLOURS[name], box) for name, box in zip(names, spots, strict=False)]
    ok = Thing("ok", "done", BLACK, spots[-1], text="ok")
    scene.things = [*fields, ok]
    which = f" in the {names[0]} field" if len(names) > 1 else ""
    instruction = f"type {word}{which}, then press ok."
    texts = {name: word if name == names[0] else "" for name in names}
    start: tuple[Action, ...] = (click(fields[0].box), type_text(word))
    other_word = rng.choice([other for other in WORDS if other != word])
    return Draft(
        instruction,
        (instruction, *scene.key()),
        scene.config(),
        judges.state_judge(scene.secret, judges.handed_in([], texts)),
        {
            "gui": (*start, click(ok.box), SUCCESS),
            "keys": (*start, press_keys("enter"), SUCCESS),
            "hints": (*scene.press_hints(fields[0]), type_text(word), press_keys("enter"), SUCCESS),
        },
        (click(fields[-1].box), type_text(other_word), click(ok.box), SUCCESS),
    )


def editor(rng: Random) -> Draft:
    """A text editor is open on a file: type a word, or put one in the place of another, and save. Code may do it, too."""
    name, word = rng.choice(FILES), rng.choice(WORDS)
    is_replacing = rng.random() < 0.5
    old = rng.choice([other for other in WORDS if other != word]) if is_replacing else ""
    path = f"{HOME}/{name}"
    opener = f"{HIDDEN}/open_window.py"
    config = (
        put_files({path: old}, programs={opener: f"{APPS}/open_window.py"}),
        execute(["/usr/bin/python3", "-I", "-S", opener, name, "mousepad", "--disable-server", path]),
    )
    if is_replacing:
        instruction = f"replace all in the file {name} with {word}, then save."
    else:
        instruction = f"type {word} in the file {name}, then save."
    write: tuple[Action, ...] = (press_keys("ctrl", "a"),) if is_replacing else ()
    write = (*write, type_text(word))
    return Draft(
        instruction,
        (instruction, old),
        config,
        judges.text_judge(name, word),
        {"gui": (*write, press_keys("ctrl", "s"), SUCCESS), "bash": (bash_write(word, name), SUCCESS)},
        (*write, SUCCESS),
        related_apps=("mousepad",),
    )


def theme(rng: Random) -> Draft:
    """Choose a theme by its swatch, or by writing its name to the file `theme`."""
    tints = {"dark": ("#202020", "#3c3c3c"), "light": (WHITE, "#f4f4f4")}
    tints.update({name: (COLOURS[name], COLOURS[name]) for name in COLOURS})
    names = [*THEMES, *rng.sample(list(COLOURS), rng.randint(0, 3))]
    rng.shuffle(names)
    wanted, now = rng.sample(names, 2)
    spots = place(rng, sides(rng, len(names), 80, 104))
    scene = Scene(rng)
    scene.things = [
        Thing(name, "swatch", tints[name][0], box, "circle") for name, box in zip(names, spots, strict=True)
    ]
    scene.fill = tints[now][1]
    scene.extra = {"theme": f"{HOME}/theme", "themes": {name: tints[name][1] for name in names}}
    swatch = {thing.id: thing for thing in scene.things}
    other = next((name for name in names if name not in (wanted, now)), now)
    return Draft(
        f"use the {wanted} theme.",
        (wanted, now, *scene.key()),
        scene.config({f"{HOME}/theme": now + "\n"}),
        judges.text_judge("theme", wanted),
        {
            "gui": (click(swatch[wanted].box), SUCCESS),
            "hints": (*scene.press_hints(swatch[wanted]), SUCCESS),
            "bash": (bash_write(wanted, "theme"), SUCCESS),
        },
        (click(swatch[other].box), SUCCESS),
    )
