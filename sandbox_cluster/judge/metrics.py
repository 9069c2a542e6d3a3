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


def literal_match(result: Any, rules: dict[str, Any], type: str = "str", ignore_case: bool = False) -> float:
    """1 if result and rules["expected"] are the same text or the same list of texts."""
    expected = rules["expected"]
    if result is None:
        return 0.0
    if type == "list":
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
    return float(all(_agrees(result.get(key), value, is_loose) for key, value in rules["expected"].items()))


def _agrees(given: Any, wanted: Any, is_loose: bool) -> bool:
    if not is_loose:
        return bool(given == wanted)
    options = wanted if isinstance(wanted, list) else [wanted]
    return given is not None and any(option == given or option in given for option in options)


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
    result: str | None, expected: str | None, strict: bool = True, ignore_case: bool = False
) -> float:
    """1 if the two files hold the same rows; not strict: cells are stripped and empty rows left out."""
    if result is None:
        return 0.0
    tables = []
    for path in (result, _needed(expected)):
        with Path(path).open(newline="") as file:
            rows = list(csv.reader(file))
        if not strict:
            rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
        if ignore_case:
            rows = [[cell.lower() for cell in row] for row in rows]
        tables.append(rows)
    return float(tables[0] == tables[1])


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
