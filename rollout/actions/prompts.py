"""System prompts, made from the action space.

`full` follows OS-Helix (appendix G.2, G.3): role, environment, grid; the chat template adds the tool schemas. `short` is a
few tokens for a policy that learned the tools by heart: every token counts on a CPU.
"""

from __future__ import annotations

import json
from typing import Literal

from rollout.actions.schema import tool_schemas
from rollout.actions.space import ActionSpace

PromptStyle = Literal["full", "short"]
_PLACES = {
    "ubuntu": "an Ubuntu desktop (x86_64)",
    "windows": "a Windows 11 desktop (x86_64)",
}
_ENVIRONMENTS = {
    "ubuntu": ('Your home folder is "/home/user".', 'The sudo password is "{password}".'),
    "windows": ('Your user name is "Docker".', 'Your home folder is "C:\\Users\\Docker".'),
}
_GRID = "Positions on the screen are given on a grid of 1000 x 1000: [0, 0] is the top left corner, whatever its size in pixels."
_WINDOWS_CODE = (
    "# Code\nOnly Python runs here; there is no Bash. For a command line, start it from Python: "
    'subprocess.run(["cmd", "/c", ...]) or subprocess.run(["powershell", "-Command", ...]).'
)


def system_prompt(
    space: ActionSpace, style: PromptStyle = "full", home: str | None = None, password: str = "password"
) -> str:
    """The system message for `space`.

    `home` and `password` are the desktop's, where they are not the public images' defaults.
    Example (short): "computer: gui, code"
    """
    if style == "short":
        return f"computer: {', '.join(space.actions)}"
    means = "the mouse and the keyboard"
    means += " and by running code on it" if "code" in space.actions else ""
    means += " and by calling tools" if "mcp" in space.actions else ""
    lines = [line.format(password=password) for line in _ENVIRONMENTS[space.os]]
    if home is not None:
        lines[-1 if space.os == "windows" else 0] = f'Your home folder is "{home}".'
    sections = [
        f"# Role and goal\nYou operate {_PLACES[space.os]} by {means}. Finish the task in as few steps as you can.",
        "# Environment\n" + "\n".join(f"- {line}" for line in (*lines, _GRID)),
        "# Answers\n- Make exactly one tool call in each answer; nothing may follow it.\n"
        "- When the task is done, or cannot be done, call the tool with action=terminate.",
    ]
    if space.os == "windows" and "code" in space.actions:
        sections.append(_WINDOWS_CODE)
    return "\n\n".join(sections)


def tools_section(space: ActionSpace) -> str:
    """The tools and how to call them, for chat templates that show no tools themselves (Qwen2.5-VL's)."""
    shown = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tool_schemas(space))
    form = (
        '{"name": NAME, "arguments": {KEY: VALUE, ...}}'
        if space.family == "qwen_json"
        else "<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>"
    )
    return f"# Tools\n\n<tools>\n{shown}\n</tools>\n\nWrite a call as\n<tool_call>\n{form}\n</tool_call>"
