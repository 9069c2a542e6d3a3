"""Short texts without a screen: copying, looking up, counting, a little JSON and Python.

They give every token a sane embedding and teach to copy from the context. Each text is an opening that is read and an
ending that follows from it and is trained.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slime_cua.synthesis.snippets import NAMES, draw_snippet
from slime_cua.synthesis.things import between, pick

Part = str | list[int]
"""Text, or token ids that stand for themselves."""

SNIPPET_SHARE = 0.5
"""Share of the texts that are requests of `snippets`."""


def make_text(
    rng: np.random.Generator, plain_ids: np.ndarray, words: tuple[str, ...] = NAMES
) -> tuple[Part, Part]:
    """(opening, ending), e.g. ("copy: cat sun = ", "cat sun"). plain_ids: tokens that may be copied at random.

    words: names besides those of the screens.
    """
    if rng.random() < SNIPPET_SHARE:
        request, answer = draw_snippet(rng, words)
        return f"{request}: ", answer
    return pick(rng, _MAKERS)(rng, plain_ids)


def _words(rng: np.random.Generator, low: int, high: int) -> list[str]:
    return [NAMES[i] for i in rng.permutation(len(NAMES))[: between(rng, low, high)]]


def _copy_words(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    text = " ".join(_words(rng, 1, 5))
    return f"copy: {text} = ", text


def _copy_tokens(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    """Any tokens in any order, twice."""
    ids = [int(i) for i in rng.choice(plain_ids, between(rng, 2, 12))]
    return ids, ids


def _look_up(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    names = _words(rng, 2, 4)
    values = [str(between(rng, 0, 9)) if rng.random() < 0.5 else pick(rng, NAMES) for _ in names]
    which = between(rng, 0, len(names) - 1)
    pairs = ", ".join(f'"{name}": "{value}"' for name, value in zip(names, values, strict=True))
    return f"{{{pairs}}} {names[which]}: ", values[which]


def _variables(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    names = [pick(rng, ("a", "b", "x", "y")), pick(rng, ("c", "d", "z", "n"))]
    values = _words(rng, 2, 2)
    which = between(rng, 0, 1)
    lines = "\n".join(f"{name} = '{value}'" for name, value in zip(names, values, strict=True))
    return f"{lines}\nprint({names[which]})\n", values[which]


def _in_quotes(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    """The same word in other surroundings."""
    word, other = _words(rng, 2, 2)
    forms = (
        ("{} is {}: ", "{}"),
        ("the {} is {}. '", "{}'"),
        ('"{}" or {}: "', '{}"'),
        ("{} = {}\n", "{}\n"),
    )
    opening, ending = pick(rng, forms)
    return opening.format(other, word), ending.format(word)


def _go_on(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    step, first = pick(rng, (1, 1, 2, 10, 20)), between(rng, 0, 20)
    numbers = [str((first + i) * step) for i in range(between(rng, 4, 7))]
    return f"{numbers[0]}, {numbers[1]}, ", ", ".join(numbers[2:])


def _how_many(rng: np.random.Generator, plain_ids: np.ndarray) -> tuple[Part, Part]:
    word, other = _words(rng, 2, 2)
    row = [word] * between(rng, 0, 5) + [other] * between(rng, 0, 3)
    text = " ".join(row[i] for i in rng.permutation(len(row)))
    return f"{text}\nhow many {word}: ", str(row.count(word))


_MAKERS: tuple[Callable[[np.random.Generator, np.ndarray], tuple[Part, Part]], ...] = (
    _copy_words,
    _copy_tokens,
    _look_up,
    _variables,
    _in_quotes,
    _go_on,
    _how_many,
)
