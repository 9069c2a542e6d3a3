"""Relative dates against dates read off a calendar by hand."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from sandbox_cluster.judge.relative_time import check, resolve
from slime_cua.core.errors import TaskError

DAY = "{DoW} {Day0D} {Month} {Year}"


def day(word: str, now: str, zone: str = "UTC") -> str:
    rules = {"relativeTime": {"from": word}, "expected": {"time": DAY}, "timezone": zone}
    return str(resolve(rules, datetime.fromisoformat(now).timestamp())["expected"]["time"])


@pytest.mark.parametrize(
    ("word", "now", "right"),
    [
        ("tomorrow", "2026-02-28T12:00+00:00", "Sun 01 Mar 2026"),
        ("this month", "2026-02-28T12:00+00:00", "Sat 28 Feb 2026"),
        ("5th next month", "2026-12-31T12:00+00:00", "Tue 05 Jan 2027"),
        ("next Monday", "2026-03-01T12:00+00:00", "Mon 02 Mar 2026"),
        ("next Monday", "2026-03-02T12:00+00:00", "Mon 09 Mar 2026"),
        ("next Friday", "2026-03-06T12:00+00:00", "Fri 13 Mar 2026"),
        ("next week Sunday", "2026-03-01T12:00+00:00", "Sun 08 Mar 2026"),
        ("this Saturday", "2026-03-01T12:00+00:00", "Sat 07 Mar 2026"),
        ("first monday four months later", "2026-08-20T12:00+00:00", "Mon 07 Dec 2026"),
        ("first monday eight months later", "2026-06-20T12:00+00:00", "Mon 01 Feb 2027"),
    ],
)
def test_a_word_means_the_day_of_the_calendar(word: str, now: str, right: str) -> None:
    assert day(word, now) == right


def test_the_day_is_that_of_the_time_zone() -> None:
    late = "2026-03-05T23:30+00:00"
    assert day("tomorrow", late) == "Fri 06 Mar 2026"
    assert day("tomorrow", late, "Asia/Tokyo") == "Sat 07 Mar 2026"


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (("next Monday", "next Friday"), ("Mon 09 Mar 2026", "Fri 13 Mar 2026")),
        (("next Saturday", "next Sunday"), ("Sat 07 Mar 2026", "Sun 08 Mar 2026")),
        (("this Saturday", "this Sunday"), ("Sat 07 Mar 2026", "Sun 08 Mar 2026")),
        (("next week Friday", "next week Sunday"), ("Fri 13 Mar 2026", "Sun 15 Mar 2026")),
        (("10th next month", "11th next month"), ("Fri 10 Apr 2026", "Sat 11 Apr 2026")),
    ],
)
def test_a_span_ends_in_the_week_it_begins_in(words: tuple[str, str], right: tuple[str, str]) -> None:
    rules = {
        "relativeTime": dict(zip(("from", "to"), words, strict=True)),
        "expected": {"from": DAY, "to": DAY},
    }
    expected = resolve(rules, datetime.fromisoformat("2026-03-05T12:00+00:00").timestamp())["expected"]
    assert (expected["from"], expected["to"]) == right
    assert rules["expected"]["from"] == DAY, "the task's own rules stay as they are"


def test_every_mark_of_a_template_is_filled_in() -> None:
    marks = "{DoW}|{Month}|{DayD}|{Year}|{Month0D}|{month}|{MonthFull}|{Day0D}|{MonthD}"
    rules = {"relativeTime": {"from": "tomorrow"}, "expected": {"time": marks}}
    filled = resolve(rules, datetime.fromisoformat("2026-03-04T12:00+00:00").timestamp())
    assert filled["expected"]["time"] == "Thu|Mar|5|2026|03|march|March|05|3"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"relativeTime": {"from": "someday"}, "expected": {}}, "'someday' is unknown"),
        ({"relativeTime": {"from": "tomorrow"}, "expected": {}, "timezone": "Moon/Base"}, "no time zone"),
        ({"expected": {}}, "relativeTime is missing"),
    ],
)
def test_what_has_no_meaning_is_refused(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        check(rules, "evaluator.expected")
