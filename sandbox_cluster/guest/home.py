"""HOME of a local desktop: window manager, fonts and themes as configured, and the user's golden files over them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from sandbox_cluster.providers.base import HOME
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import ConfigError

FONT, MONO_FONT = "DejaVu Sans", "DejaVu Sans Mono"
WM_CONFIG = f"{HOME}/.config/openbox/rc.xml"
_LOCKS = {"SingletonLock", "SingletonCookie", "SingletonSocket", "parent.lock", ".parentlock"}
"""Of Chromium (links there, which are not copied anyway), Firefox and Thunderbird."""
FOLDERS = {"DESKTOP": "Desktop", "DOCUMENTS": "Documents", "DOWNLOAD": "Downloads", "PICTURES": "Pictures"}


@dataclass(frozen=True)
class HomeFile:
    """A file to write before anything starts; a path with a slash at its end is an empty folder."""

    path: str
    mode: int
    data: bytes


def home_files(config: DesktopConfig) -> list[HomeFile]:
    """Our settings, then the golden folder's files. ConfigError when the golden folder cannot be read."""
    ours = {
        WM_CONFIG: window_manager_config(config),
        f"{HOME}/.config/gtk-3.0/settings.ini": _gtk3(config),
        f"{HOME}/.gtkrc-2.0": f'gtk-theme-name="{config.theme}"\ngtk-font-name="{FONT} {_points(config)}"\n',
        f"{HOME}/.config/user-dirs.dirs": "".join(
            f'XDG_{key}_DIR="$HOME/{name}"\n' for key, name in FOLDERS.items()
        ),
        **{f"{HOME}/{name}/": "" for name in FOLDERS.values()},
    }
    files = [HomeFile(path, 0o644, text.encode()) for path, text in ours.items()]
    return files + _golden(config.golden_home)


def x_resources(config: DesktopConfig) -> str:
    """Text of the RESOURCE_MANAGER property: one font for Tk, Xt and xterm."""
    return (
        "Xft.dpi: 96\nXft.antialias: 1\nXft.hinting: 1\nXft.hintstyle: hintslight\nXft.rgba: none\n"
        f"*TkDefaultFont: {{{FONT}}} -{config.font_px}\nTk*font: {{{FONT}}} -{config.font_px}\n"
        "*insertOffTime: 0\n"
        f"XTerm*faceName: {MONO_FONT}\nXTerm*faceSize: {_points(config)}\nXTerm*cursorBlink: false\n"
    )


def window_manager_config(config: DesktopConfig) -> str:
    """openbox' rc.xml: one desktop, click to focus, usual keys, no root menu; normal windows maximised if configured."""
    keys = {"A-F4": "Close", "A-Escape": "Lower", "W-d": "ToggleShowDesktop"}
    key_lines = "".join(
        f'<keybind key="{key}"><action name="{action}"/></keybind>' for key, action in keys.items()
    )
    font = f"<name>{escape(FONT)}</name><size>{_points(config)}</size><weight>Normal</weight><slant>Normal</slant>"
    fonts = "".join(
        f'<font place="{place}">{font}</font>'
        for place in ("ActiveWindow", "InactiveWindow", "MenuHeader", "MenuItem", "ActiveOnScreenDisplay")
    )
    maximised = (
        '<application type="normal"><maximized>yes</maximized></application>' if config.maximise else ""
    )
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<openbox_config xmlns="http://openbox.org/3.4/rc">
<focus><focusNew>yes</focusNew><followMouse>no</followMouse><raiseOnFocus>no</raiseOnFocus></focus>
<placement><policy>Smart</policy><center>yes</center></placement>
<theme><name>Clearlooks</name><titleLayout>NLIMC</titleLayout><animateIconify>no</animateIconify>{fonts}</theme>
<desktops><number>1</number><popupTime>0</popupTime></desktops>
<resize><drawContents>yes</drawContents><popupShow>Never</popupShow></resize>
<keyboard>{key_lines}{_SWITCH_KEYS}</keyboard>
<mouse><dragThreshold>4</dragThreshold><doubleClickTime>400</doubleClickTime>{_MOUSE}</mouse>
<applications>{maximised}</applications>
</openbox_config>
"""


_SWITCH_KEYS = (
    '<keybind key="A-Tab"><action name="NextWindow"><finalactions><action name="Focus"/><action name="Raise"/>'
    '<action name="Unshade"/></finalactions></action></keybind>'
)


def _bind(button: str, on: str, *actions: str) -> str:
    return (
        f'<mousebind button="{button}" action="{on}">'
        + "".join(f'<action name="{action}"/>' for action in actions)
        + "</mousebind>"
    )


def _context(name: str, *binds: str) -> str:
    return f'<context name="{name}">{"".join(binds)}</context>'


_FOCUS = ("Focus", "Raise", "Unshade")
_MOUSE = (
    _context("Titlebar", _bind("Left", "Drag", "Move"), _bind("Left", "DoubleClick", "ToggleMaximize"))
    + _context(
        "Titlebar Top Right Bottom Left TLCorner TRCorner BRCorner BLCorner", _bind("Left", "Press", *_FOCUS)
    )
    + "".join(
        _context(
            place,
            f'<mousebind button="Left" action="Drag"><action name="Resize"><edge>{edge}</edge></action></mousebind>',
        )
        for place, edge in (("Top", "top"), ("Bottom", "bottom"), ("Left", "left"), ("Right", "right"))
    )
    + _context("TLCorner TRCorner BRCorner BLCorner", _bind("Left", "Drag", "Resize"))
    + _context(
        "Client", *(_bind(button, "Press", "Focus", "Raise") for button in ("Left", "Middle", "Right"))
    )
    + _context("Close", _bind("Left", "Press", "Focus", "Raise"), _bind("Left", "Click", "Close"))
    + _context("Iconify", _bind("Left", "Press", "Focus", "Raise"), _bind("Left", "Click", "Iconify"))
    + _context("Maximize", _bind("Left", "Press", *_FOCUS), _bind("Left", "Click", "ToggleMaximize"))
)


def _gtk3(config: DesktopConfig) -> str:
    return (
        "[Settings]\n"
        f"gtk-theme-name={config.theme}\ngtk-font-name={FONT} {_points(config)}\n"
        "gtk-enable-animations=0\ngtk-cursor-blink=0\ngtk-recent-files-enabled=0\ngtk-xft-dpi=98304\n"
    )


def _points(config: DesktopConfig) -> str:
    """font_px at 96 dots an inch."""
    return f"{config.font_px * 0.75:g}"


def _is_lock(path: Path) -> bool:
    """A lock that a program of another life left in its profile: who finds it waits, asks, or refuses to start."""
    is_office = path.name == ".lock" and path.parent.parent.name == "libreoffice"
    return is_office or path.name in _LOCKS or path.name.startswith(".~lock.")


def _golden(folder: str) -> list[HomeFile]:
    if not folder:
        return []
    root = Path(folder)
    if not root.is_dir():
        raise ConfigError(f"golden_home {folder} is not a folder")
    files = []
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink() and not _is_lock(path):
            target = f"{HOME}/{path.relative_to(root).as_posix()}"
            files.append(HomeFile(target, path.stat().st_mode & 0o777, path.read_bytes()))
    return files
