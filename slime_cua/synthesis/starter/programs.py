"""Families solved by code: files (the words say all), hybrid (what to write is on the screen)."""

from __future__ import annotations

from random import Random

from slime_cua.core.actions import CodeAction
from slime_cua.synthesis.starter import judges
from slime_cua.synthesis.starter.draft import (
    HOME,
    SUCCESS,
    Crowded,
    Draft,
    Scene,
    Thing,
    place,
    put_files,
    sides,
)
from slime_cua.synthesis.starter.vocabulary import COLOURS, FILES, FOLDERS, NUMBERS, SHAPES, WORDS

_PATHLIB = "from pathlib import Path; (Path.home() / '"


def bash(code: str) -> CodeAction:
    return CodeAction(language="bash", code=code)


def bash_write(text: str, name: str) -> CodeAction:
    """Write `text` and a line break to the file `name` in the home folder."""
    return bash(f"echo {text} > ~/{name}")


def python_write(text: str, name: str) -> CodeAction:
    return CodeAction(language="python", code=f"{_PATHLIB}{name}').write_text('{text}')")


def files(rng: Random) -> Draft:
    """Write, rename, copy, delete or count files in the home folder. No window is open."""
    return rng.choice((_write, _write, _rename, _copy, _delete, _count, _count))(rng)


def _write(rng: Random) -> Draft:
    word, name = rng.choice(WORDS), rng.choice(FILES)
    other = rng.choice([item for item in WORDS if item != word])
    routes = {"bash": bash_write(word, name), "python": python_write(word, name)}
    return _draft(f"write {word} to the file {name}.", {}, {name: word}, routes, bash_write(other, name))


def _rename(rng: Random) -> Draft:
    old, new, kept = rng.sample(FILES, 3)
    word, other = rng.sample(WORDS, 2)
    python = CodeAction(language="python", code=f"{_PATHLIB}{old}').rename(Path.home() / '{new}')")
    return _draft(
        f"rename the file {old} to {new}.",
        {old: word, kept: other},
        {new: word, kept: other},
        {"bash": bash(f"mv ~/{old} ~/{new}"), "python": python},
        bash(f"cp ~/{old} ~/{new}"),
    )


def _copy(rng: Random) -> Draft:
    old, new, kept = rng.sample(FILES, 3)
    word, other = rng.sample(WORDS, 2)
    return _draft(
        f"copy the file {old} to {new}.",
        {old: word, kept: other},
        {old: word, new: word, kept: other},
        {"bash": bash(f"cp ~/{old} ~/{new}")},
        bash(f"mv ~/{old} ~/{new}"),
    )


def _delete(rng: Random) -> Draft:
    gone, *kept = rng.sample(FILES, rng.randint(2, 4))
    words = dict(zip([gone, *kept], rng.sample(WORDS, 1 + len(kept)), strict=True))
    python = CodeAction(language="python", code=f"{_PATHLIB}{gone}').unlink()")
    return _draft(
        f"delete the file {gone}.",
        words,
        {name: words[name] for name in kept},
        {"bash": bash(f"rm ~/{gone}"), "python": python},
        bash(f"rm ~/{kept[0]}"),
    )


def _count(rng: Random) -> Draft:
    folder, name = rng.choice(FOLDERS), rng.choice(FILES)
    inside = rng.sample(WORDS, rng.randint(1, 6))
    guess = rng.choice([number for number in NUMBERS if number != str(len(inside))])
    return _draft(
        f"count the files in {folder} and write the number to the file {name}.",
        {f"{folder}/{word}": "" for word in inside},
        {name: str(len(inside))},
        {"bash": bash(f"ls ~/{folder} | wc -l > ~/{name}")},
        bash_write(guess, name),
    )


def _draft(
    instruction: str,
    before: dict[str, str],
    after: dict[str, str],
    routes: dict[str, CodeAction],
    wrong: CodeAction,
) -> Draft:
    config = (put_files({f"{HOME}/{name}": text for name, text in before.items()}),) if before else ()
    return Draft(
        instruction,
        ("home", instruction),  # all that is seen before the first action: no window is open
        config,
        judges.home_judge(after),
        {way: (action, SUCCESS) for way, action in routes.items()},
        (wrong, SUCCESS),
        related_apps=(),
    )


def hybrid(rng: Random) -> Draft:
    """Look at the screen, write what was seen to a file."""
    asked = rng.choice(("colour", "colour", "shape", "shape", "place", "number"))
    count = rng.randint(1, 6) if asked == "number" else rng.randint(2, 4)
    colours = rng.sample(list(COLOURS), count)
    shapes = [rng.choice(SHAPES)] * count if asked == "number" else rng.sample(SHAPES, count)
    spots = place(rng, sides(rng, count, 72, 104))
    place_name = rng.choice(("left", "right"))
    if asked == "place":
        spots.sort(key=lambda box: box[0] if place_name == "left" else -box[0])
        if abs(spots[0][0] - spots[1][0]) < 64:
            raise Crowded("it is not clear which one is meant")
    scene = Scene(rng)
    scene.things = [
        Thing(f"t{index}", "look", COLOURS[colour], box, shape)
        for index, (colour, shape, box) in enumerate(zip(colours, shapes, spots, strict=True))
    ]
    name = rng.choice(FILES)
    seen, answer, pool = {
        "colour": (f"color of the {shapes[0]}", colours[0], tuple(COLOURS)),
        "shape": (f"shape of the {colours[0]} one", shapes[0], SHAPES),
        "place": (f"color on the {place_name}", colours[0], tuple(COLOURS)),
        "number": ("number of shapes", str(count), NUMBERS),
    }[asked]
    guess = rng.choice([item for item in pool if item != answer])
    instruction = f"write the {seen} to the file {name}."
    return Draft(
        instruction,
        (f"write the {seen}", *scene.key()),
        scene.config(),
        judges.text_judge(name, answer),
        {"bash": (bash_write(answer, name), SUCCESS), "python": (python_write(answer, name), SUCCESS)},
        (bash_write(guess, name), SUCCESS),
    )
