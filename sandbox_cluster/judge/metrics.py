"""Metrics of OSWorld evaluators that this build has. Runs inside the jail: standard library only, no import of ours.

Each takes a result (text, a file's path, or None when there was none) and, if it needs one, what is expected; it gives a
number in [0, 1]. Source: the OSWorld evaluator format; behaviour as its task files use it.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any


def exact_match(result: Any, rules: dict[str, Any]) -> float:
    """1 if the result equals rules["expected"]."""
    return float(result == rules["expected"])


def match_in_list(result: Any, rules: dict[str, Any]) -> float:
    """1 if the result is one of rules["expected"]."""
    return float(result in rules["expected"])


def is_in_list(result: Any, rules: dict[str, Any]) -> float:
    """1 if rules["expected"] is in the result."""
    return float(result is not None and rules["expected"] in result)


def literal_match(result: Any, expected: Any, type: str = "str", ignore_case: bool = False) -> float:
    """1 if result and expected (the rules themselves) are the same text or the same list of texts."""
    if result is None:
        return 0.0
    if type == "list":
        if not isinstance(result, list) or not isinstance(expected, list):
            return 0.0
        given, wanted = [str(one) for one in result], [str(one) for one in expected]
    else:
        given, wanted = [str(result)], [str(expected)]
    if ignore_case:
        given, wanted = [one.lower() for one in given], [one.lower() for one in wanted]
    return float(given == wanted)


def check_include_exclude(result: str | None, rules: dict[str, Any]) -> float:
    """1 if the result has all of rules["include"] and none of rules["exclude"]."""
    if result is None:
        return 0.0
    has_all = all(part in result for part in rules.get("include", []))
    return float(has_all and not any(part in result for part in rules.get("exclude", [])))


def check_direct_json_object(result: Any, rules: dict[str, Any]) -> float:
    """1 if each key of rules["expected"] has that value in the result (text is read as JSON).

    With rules["expect_in_result"] the value of a key may be a list of which one is in the result's value.
    """
    if isinstance(result, str):
        try:
            result = json.loads(result.strip().replace("'", '"'))
        except ValueError:
            return 0.0
    if not isinstance(result, dict):
        return 0.0
    is_loose = bool(rules.get("expect_in_result", False))
    expected = dict(rules["expected"])
    is_unordered = bool(expected.pop("ignore_list_order", False))
    return float(
        all(_agrees(result.get(key), value, is_loose, is_unordered) for key, value in expected.items())
    )


def _agrees(given: Any, wanted: Any, is_loose: bool, is_unordered: bool) -> bool:
    if not is_loose:
        if is_unordered and isinstance(given, list) and isinstance(wanted, list):
            return sorted(map(str, given)) == sorted(map(str, wanted))
        return bool(given == wanted)
    if isinstance(wanted, list):
        return any(one in given if isinstance(given, list) else one == given for one in wanted)
    return isinstance(wanted, str) and isinstance(given, str | list) and wanted in given


def file_exists(result: str | None, rules: dict[str, Any] | None = None) -> float:
    """1 if the file was there (and, with rules["min_bytes"], at least so large)."""
    if result is None:
        return 0.0
    return float(Path(result).stat().st_size >= (rules or {}).get("min_bytes", 0))


def compare_text_file(
    result: str | None, expected: str | None, ignore_blanks: bool = False, ignore_case: bool = False
) -> float:
    """1 if the two files hold the same text."""
    if result is None:
        return 0.0
    texts = [Path(path).read_text() for path in (result, _needed(expected))]
    if ignore_blanks:
        texts = [re.sub(r"\s+", " ", text).strip() for text in texts]
    if ignore_case:
        texts = [text.lower() for text in texts]
    return float(texts[0] == texts[1])


def compare_csv(
    result: str | None, expected: str | list[str] | None, strict: bool = True, ignore_case: bool = False
) -> float:
    """1 if the file holds the rows of `expected`, or of one of several; not strict: cells are stripped and empty rows left out."""
    if result is None:
        return 0.0
    wanted = expected if isinstance(expected, list) else [expected]
    given = _rows(result, strict, ignore_case)
    return float(any(given == _rows(_needed(one), strict, ignore_case) for one in wanted))


def _rows(path: str, strict: bool, ignore_case: bool) -> list[list[str]]:
    with Path(path).open(newline="") as file:
        rows = list(csv.reader(file))
    if not strict:
        rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    return [[cell.lower() for cell in row] for row in rows] if ignore_case else rows


def compare_json(result: str | None, expected: str | None) -> float:
    """1 if the two files hold the same JSON value; a result that is no JSON is 0."""
    if result is None:
        return 0.0
    wanted = json.loads(Path(_needed(expected)).read_text())
    try:
        return float(json.loads(Path(result).read_text()) == wanted)
    except ValueError:
        return 0.0


def _needed(expected: str | None) -> str:
    if expected is None:
        raise ValueError("the expected file is missing: the task's set-up did not bring it")
    return expected
