"""Rules whose expected values depend on the date: `rule_relativeTime`, with the moment given, never taken from a clock here.

Source: the words and templates that OSWorld's task files use (desktop-env 1.0.2, evaluators/getters/misc.py). Otherwise than there:
the month after eight or four months may be December, "this Saturday" on a Sunday is the coming one, an unknown word or time
zone is an error, and a missing time zone is UTC, not the address of the machine.
"""

from __future__ import annotations

import calendar
import copy
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from slime_cua.core.errors import TaskError

MONDAY, FRIDAY, SATURDAY, SUNDAY = 0, 4, 5, 6
_DAY_OF_MONTH = {"5th next month": 5, "10th next month": 10, "11th next month": 11}
_FIRST_MONDAY = {"first monday four months later": 4, "first monday eight months later": 8}
_NEXT_WEEK = {"next week Friday": FRIDAY, "next week Saturday": SATURDAY, "next week Sunday": SUNDAY}
_COMING = {"next Friday": FRIDAY, "next Saturday": SATURDAY, "next Sunday": SUNDAY}
_THIS = {"this Saturday": SATURDAY, "this Sunday": SUNDAY}
_NEXT_MONDAY = ("next Monday", "next Monday split")
WORDS = frozenset(
    {
        *("tomorrow", "this month", *_NEXT_MONDAY, "next Friday split"),
        *(*_DAY_OF_MONTH, *_FIRST_MONDAY, *_NEXT_WEEK, *_COMING, *_THIS),
    }
)


def check(rules: Any, where: str) -> None:
    """Raises TaskError for what `resolve` could not do."""
    if not isinstance(rules, Mapping) or not isinstance(rules.get("relativeTime"), Mapping):
        raise TaskError(f"{where}.rules.relativeTime is missing")
    if "from" not in rules["relativeTime"] or not isinstance(rules.get("expected"), Mapping):
        raise TaskError(f"{where}.rules needs relativeTime.from and expected")
    for name, word in rules["relativeTime"].items():
        if name not in ("from", "to") or word not in WORDS:
            raise TaskError(
                f"{where}.rules.relativeTime.{name} = {word!r} is unknown; known: {', '.join(sorted(WORDS))}"
            )
    zone_of(rules, where)


def zone_of(rules: Mapping[str, Any], where: str) -> ZoneInfo:
    """The rules' time zone; UTC without one."""
    name = rules.get("timezone", "UTC")
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, TypeError, OSError):
        raise TaskError(f"{where}.rules.timezone {name!r} is no time zone") from None


def resolve(rules: Mapping[str, Any], now_s: float) -> dict[str, Any]:
    """The rules with the templates of `expected` filled in, for the moment now_s (Unix time). Leaves `rules` as it is."""
    result: dict[str, Any] = copy.deepcopy(dict(rules))
    words, expected = result["relativeTime"], result["expected"]
    today = datetime.fromtimestamp(now_s, zone_of(rules, "rule_relativeTime")).date()
    start = _day(words["from"], today, None)
    if "to" not in words:
        _fill(expected, ("time",), start)
        return result
    end = _day(words["to"], today, (words["from"], start))
    _fill(expected, ("puDay", "puMonth", "puYear") if words["from"].endswith("split") else ("from",), start)
    _fill(expected, ("doDay", "doMonth", "doYear") if words["to"].endswith("split") else ("to",), end)
    return result


def _day(word: str, today: date, start: tuple[str, date] | None) -> date:
    """The day that a word means; `start`: the word and day of the span's beginning, when this is its end."""
    if word == "tomorrow":
        return today + timedelta(days=1)
    if word == "this month":
        return today
    if word in _DAY_OF_MONTH:
        return _months_later(today, 1).replace(day=_DAY_OF_MONTH[word])
    if word in _FIRST_MONDAY:
        return _on(_months_later(today, _FIRST_MONDAY[word]), MONDAY)
    if word in _NEXT_MONDAY:
        return _on(today + timedelta(days=1), MONDAY)
    if word in _NEXT_WEEK:
        return _on(_on(today + timedelta(days=1), MONDAY), _NEXT_WEEK[word])
    if word in _THIS:
        return _on(today, _THIS[word])
    if start is not None and start[0] in (*_NEXT_MONDAY, "next Friday", "next Saturday"):
        return _on(start[1], SUNDAY if word == "next Sunday" else FRIDAY)
    return _on(today + timedelta(days=1), _COMING.get(word, FRIDAY))


def _on(day: date, weekday: int) -> date:
    """The first such weekday from `day` on."""
    return day + timedelta(days=(weekday - day.weekday()) % 7)


def _months_later(day: date, months: int) -> date:
    """The first of the month so many months later."""
    years, month = divmod(day.month - 1 + months, 12)
    return date(day.year + years, month + 1, 1)


def _fill(expected: dict[str, Any], names: tuple[str, ...], day: date) -> None:
    month = calendar.month_name[day.month]
    values = {
        "{DoW}": calendar.day_abbr[day.weekday()],
        "{Month}": calendar.month_abbr[day.month],
        "{DayD}": str(day.day),
        "{Year}": str(day.year),
        "{Month0D}": f"{day.month:02}",
        "{month}": month.lower(),
        "{MonthFull}": month,
        "{Day0D}": f"{day.day:02}",
        "{MonthD}": str(day.month),
    }
    for name in names:
        if name not in expected:
            raise TaskError(f"rule_relativeTime: rules.expected.{name} is missing")
        text = str(expected[name])
        for mark, value in values.items():
            text = text.replace(mark, value)
        expected[name] = text
