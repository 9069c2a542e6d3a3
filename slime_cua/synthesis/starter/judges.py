"""Judges of the starter tasks: evaluator JSON with self-contained rule functions, run away from the desktop.

A judge gets the path of a copy of a file (`vm_file`; None when it is missing) or a command's stdout (`vm_command_line`).
Whatever the policy may have written into a file is a score of 0, never an exception.
"""

from __future__ import annotations

from typing import Any

from slime_cua.synthesis.starter.draft import HOME, STATE

_STATE_RULE = """def call_rule_judge_1(result, expected):
    import hashlib, json
    try:
        with open(result) as file:
            state = json.loads(file.read(100000))
        events = state["events"]
        tag = hashlib.sha256(({secret!r} + json.dumps(events)).encode()).hexdigest()
        if tag != state["tag"]:
            return 0.0
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0
    return float({rule})
"""

_FILE_RULE = """def call_rule_judge_1(result, expected):
    try:
        with open(result) as file:
            text = file.read(1000).strip()
    except (OSError, ValueError, TypeError):
        return 0.0
    return float(text == {text!r})
"""

_HOME_RULE = """def call_rule_judge_1(result, expected):
    found = (result or "").split()
    return float(found == {found!r})
"""


def state_judge(secret: str, rule: str) -> dict[str, Any]:
    """1 when the board's signed `events` satisfy `rule`, an expression over `events` that gives a bool."""
    return _judge(
        {"type": "vm_file", "path": STATE, "dest": "state.json"}, _STATE_RULE.format(secret=secret, rule=rule)
    )


def pressed(names: list[str], before: list[list[str]] | None = None) -> str:
    """Rule: after exactly the events `before`, only `names` were pressed, in that order; more presses of the same count not."""
    return (
        f"[e for i, e in enumerate(events) if i == 0 or e != events[i - 1]] == "
        f"{[*(before or []), *(['press', name] for name in names)]!r}"
    )


def handed_in(ticked: list[str], texts: dict[str, str]) -> str:
    """Rule: the form was handed in once with these ticks and texts."""
    return f"events == {[['done', sorted(ticked), texts]]!r}"


def text_judge(name: str, text: str) -> dict[str, Any]:
    """1 when the file `name` in the home folder holds `text`, blanks around it aside."""
    return _judge({"type": "vm_file", "path": f"{HOME}/{name}", "dest": name}, _FILE_RULE.format(text=text))


def home_judge(contents: dict[str, str]) -> dict[str, Any]:
    """1 when the home folder holds exactly the visible files `contents` (name -> one word, or several)."""
    script = f'cd {HOME} && for f in *; do [ -f "$f" ] && echo "$f" && cat "$f" && echo; done; true'
    found = [word for name in sorted(contents) for word in [name, *contents[name].split()]]
    return _judge(
        {"type": "vm_command_line", "command": ["/bin/sh", "-c", script]}, _HOME_RULE.format(found=found)
    )


def infeasible() -> dict[str, Any]:
    """1 only for a policy that ends by saying that the task cannot be done (OSWorld's rule)."""
    return {"func": "infeasible"}


def _judge(getter: dict[str, Any], code: str) -> dict[str, Any]:
    return {"judges": [{"result_getter": getter, "expected_getter": None, "code": code}]}
