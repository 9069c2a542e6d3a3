"""Requests whose answer repeats words of the request in other surroundings, or puts what is on a screen there.

("open the file cat", "open('cat')"): generic English in, small pieces of shell, Python and JSON out. They teach a policy to
carry words, names and numbers from a request into an answer, in the right roles. None is an instruction of the starter
tasks or an action of theirs, and no grammar of actions is shown.
"""

from __future__ import annotations

import numpy as np

from slime_cua.synthesis.questions import Question
from slime_cua.synthesis.starter import vocabulary
from slime_cua.synthesis.things import HUES, WORDS, between, pick

NAMES = (*WORDS, *HUES, *vocabulary.SHAPES, *vocabulary.PLACES, *vocabulary.THEMES)

SNIPPETS: tuple[tuple[str, str], ...] = (
    ("say {a}", "print('{a}')"),
    ("say {a} twice", "{a} {a}"),
    ("quote {a}", '"{a}"'),
    ("spell {a} on the line", "> {a}"),
    ("show the text of {a}", "cat {a}"),
    ("open {a}", "open('{a}')"),
    ("read the file {a}", "open('{a}').read()"),
    ("make a folder {a}", "mkdir ~/{a}"),
    ("go to {a}", "cd ~/{a}"),
    ("touch the file {a}", "touch ~/{a}"),
    ("find {a} in the file {b}", "grep {a} ~/{b}"),
    ("the file {a} is in the folder {b}", "~/{b}/{a}"),
    ("put the word {a} into the list {b}", "{b}.append('{a}')"),
    ("add {a} to the end of the file {b}", "echo {a} >> ~/{b}"),
    ("fill the word entry with {a}", '{{"word": "{a}"}}'),
    ("set {a} to {b}", '{{"{a}": "{b}"}}'),
    ("let {a} be {b}", "{a} = '{b}'"),
    ("send {a} to {b}", "send --to {b} {a}"),
    ("link {a} as {b}", "link ~/{a} ~/{b}"),
    ("{a} before {b}", "{a}, {b}"),
    ("{a} after {b}", "{b}, {a}"),
    ("{a} and not {b}", "{a}"),
    ("not {a} but {b}", "{b}"),
    ("change {a} into {b}", "sed {a} {b}"),
    ("use {b} in place of {a}", "sed {a} {b}"),
    ("from {a} take {b} and {c}", "from {a} import {b}, {c}"),
    ("{a}, {b}, then {c}", "{a} {b} {c}"),
    ("{a}, {b}, {c} backwards", "{c} {b} {a}"),
    ("check that {a} is {b}", "if {a} == '{b}': print('{a}')"),
    ("remember {a}", "{a}"),
)
"""Request -> answer. The same words stand in both; names differ from each other."""

SEEN: tuple[tuple[str, str], ...] = (
    ("say {seen}", "print('{seen}')"),
    ("quote {seen}", '"{seen}"'),
    ("put {seen} into the list {b}", "{b}.append('{seen}')"),
    ("add {seen} to the end of the file {b}", "echo {seen} >> ~/{b}"),
    ("set {b} to {seen}", '{{"{b}": "{seen}"}}'),
    ("let {b} be {seen}", "{b} = '{seen}'"),
    ("fill the word entry with {seen}", '{{"word": "{seen}"}}'),
)
"""The same with something that must be seen: "say the color of the circle" -> print('red')."""

SEEN_KINDS = ("tell_color", "tell_shape", "tell_word", "word_at", "value", "count")


def draw_snippet(rng: np.random.Generator, words: tuple[str, ...]) -> tuple[str, str]:
    """(request, answer), e.g. ("send cat to plan", "send --to plan cat"). words: names besides those of the screens."""
    request, answer = pick(rng, SNIPPETS)
    names = _names(rng, words)
    return request.format(**names), answer.format(**names)


def fill_in(rng: np.random.Generator, question: Question, words: tuple[str, ...]) -> tuple[str, str]:
    """(request, answer) with what `question` asks for, e.g. ("say the color of the circle", "print('red')")."""
    request, answer = pick(rng, SEEN)
    name = _names(rng, words)["b"]
    return (
        request.format(seen=question.phrase, b=name),
        answer.format(seen=question.answer, b=name),
    )


def _names(rng: np.random.Generator, words: tuple[str, ...]) -> dict[str, str]:
    found: list[str] = []
    while len(found) < 3:
        name = _name(rng, words)
        if name not in found:
            found.append(name)
    return dict(zip("abc", found, strict=True))


def _name(rng: np.random.Generator, words: tuple[str, ...]) -> str:
    """A word of the screens, any word, a number, or a name of several tokens such as "sun_12"."""
    turn = rng.random()
    if turn < 0.45:
        return pick(rng, NAMES)
    if turn < 0.8:
        return pick(rng, words)
    if turn < 0.9:
        return str(between(rng, 0, 99))
    return f"{pick(rng, words)}{pick(rng, ('_', '-', '.', ''))}{between(rng, 0, 99)}"
