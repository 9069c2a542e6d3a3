"""The accessibility tree of a desktop as OSWorld's /accessibility gives it. Runs inside as `python3 -I -c THIS MODE`.

Standard library and python3-gi with the Atspi typelib; never imported by the host. MODE `tree` prints the XML; `terminal` the
text of the focused terminal. The last line is JSON: {"reason": why there is nothing}, when there is nothing.
Source: AT-SPI 2; names, roles and namespaces as OSWorld's server writes them.
"""

# ruff: noqa: SIM105, UP031

import json
import os
import sys
import xml.etree.ElementTree as ET

BASE = "https://accessibility.ubuntu.example.org/ns/"
NAMES = {
    "st": "state",
    "attr": "attributes",
    "cp": "component",
    "doc": "document",
    "docattr": "document/attributes",
    "txt": "text",
    "val": "value",
    "act": "action",
}
MAX_DEPTH, MAX_WIDTH, MAX_NODES = 50, 1024, 5000


def nothing(reason):
    print(json.dumps({"reason": reason}))
    sys.exit(0)


if os.environ.get("NO_AT_BRIDGE") == "1":
    nothing("this desktop runs without an accessibility bus: set sandbox.accessibility=true")
try:
    import gi

    gi.require_version("Atspi", "2.0")
    from gi.repository import Atspi
except (ImportError, ValueError):
    nothing(
        "no Atspi here; as root: apt-get install -y --no-install-recommends at-spi2-core gir1.2-atspi-2.0 python3-gi"
    )


def name(space, word):
    return "{%s%s}%s" % (
        BASE,
        NAMES[space],
        "".join(c if c.isalnum() or c in "-_." else "-" for c in word) or "x",
    )


def clean(text):
    """`text` without what XML 1.0 cannot hold."""
    return "".join(
        c
        for c in text or ""
        if c in "\t\n\r" or (c >= " " and c not in "\ufffe\uffff" and not "\ud800" <= c <= "\udfff")
    )


def states(node):
    found = node.get_state_set().get_states()
    return {name("st", Atspi.StateType(state).value_nick): "true" for state in found}


def attributes(node):
    return {name("attr", key): clean(value) for key, value in (node.get_attributes() or {}).items()}


def place(node):
    component = node.get_component_iface()
    if component is None:
        return {}
    box = component.get_extents(Atspi.CoordType.SCREEN)
    return {name("cp", "screencoord"): str((box.x, box.y)), name("cp", "size"): str((box.width, box.height))}


def value(node):
    held = node.get_value_iface()
    if held is None:
        return {}
    return {
        name("val", "value"): str(held.get_current_value()),
        name("val", "min"): str(held.get_minimum_value()),
        name("val", "max"): str(held.get_maximum_value()),
        name("val", "step"): str(held.get_minimum_increment()),
    }


def actions(node):
    held = node.get_action_iface()
    words = {}
    for index in range(min(held.get_n_actions(), 8) if held is not None else 0):
        word = (held.get_action_name(index) or "").replace(" ", "-")
        words[name("act", word + "_desc")] = clean(held.get_action_description(index))
        words[name("act", word + "_kb")] = clean(held.get_key_binding(index))
    return words


def text_of(node):
    held = node.get_text_iface()
    return clean(Atspi.Text.get_text(held, 0, -1)) if held is not None else ""


count = 0


def element(node, depth):
    """One node and what is below it; a part that its program does not answer for is left out."""
    global count
    count += 1
    made = ET.Element((node.get_role_name() or "unknown").replace(" ", "-"))
    made.set("name", clean(node.get_name()))
    for part in (states, attributes, place, value, actions):
        try:
            for key, word in part(node).items():
                made.set(key, word)
        except Exception:
            pass
    try:
        made.text = text_of(node)
    except Exception:
        pass
    if depth < MAX_DEPTH:
        for index in range(min(node.get_child_count(), MAX_WIDTH)):
            if count >= MAX_NODES:
                break
            try:
                child = node.get_child_at_index(index)
                if child is not None:
                    made.append(element(child, depth + 1))
            except Exception:
                pass
    return made


def terminal(node, depth):
    """Text of a showing terminal below `node`; None when there is none."""
    if node.get_role() == Atspi.Role.TERMINAL and node.get_state_set().contains(Atspi.StateType.SHOWING):
        return text_of(node)
    for index in range(min(node.get_child_count(), MAX_WIDTH) if depth < MAX_DEPTH else 0):
        child = node.get_child_at_index(index)
        found = terminal(child, depth + 1) if child is not None else None
        if found is not None:
            return found
    return None


def windows(desktop):
    """All top windows, active ones first."""
    found = []  # type: list
    for index in range(desktop.get_child_count()):
        program = desktop.get_child_at_index(index)
        for number in range(program.get_child_count() if program is not None else 0):
            window = program.get_child_at_index(number)
            if window is not None:
                found.append(
                    (not window.get_state_set().contains(Atspi.StateType.ACTIVE), len(found), window)
                )
    return [window for _, _, window in sorted(found, key=lambda one: one[:2])]


Atspi.init()
desktop = Atspi.get_desktop(0)
if sys.argv[1] == "tree":
    for short, long in NAMES.items():
        ET.register_namespace(short, BASE + long)
    root = element(desktop, 0)
    root.tag = "desktop-frame"
    print(ET.tostring(root, encoding="unicode"))
else:
    for window in windows(desktop):
        found = terminal(window, 0)
        if found is not None:
            print(json.dumps({"output": found.rstrip()}))
            break
    else:
        nothing(
            "no window here is a terminal that tells its text (xterm does not; gnome-terminal and xfce4-terminal do)"
        )
