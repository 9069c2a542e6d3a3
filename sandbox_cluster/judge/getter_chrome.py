"""Getters that read the profile of Chrome (Chromium) or Edge: the host fetches the file, the jail looks into it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sandbox_cluster.judge.scene import Argument, Scene

_LINUX = ("~/.config/google-chrome", "~/.config/chromium", "~/snap/chromium/common/chromium")
_WINDOWS = "AppData\\Local\\Google\\Chrome\\User Data"
_EDGE_LINUX = ("~/.config/microsoft-edge",)
_EDGE_WINDOWS = "AppData\\Local\\Microsoft\\Edge\\User Data"
_FONTS = {"default_fixed_font_size": 13, "default_font_size": 16, "minimum_font_size": 13}
_EDGE_FONTS = {"default_fixed_font_size": 13, "default_font_size": 16}
_HISTORY = "SELECT url, title, last_visit_time FROM urls"
_COOKIES = "SELECT * FROM cookies"


def paths(scene: Scene, file: str, is_edge: bool = False) -> list[str]:
    """Where a profile's file may be, e.g. "Default/Preferences"."""
    if scene.desktop.platform.is_windows:
        root = _EDGE_WINDOWS if is_edge else _WINDOWS
        return [f"{root}\\{file.replace('/', chr(92))}"]
    return [f"{root}/{file}" for root in (_EDGE_LINUX if is_edge else _LINUX)]


def _profile(
    file: str, parser: str, is_edge: bool = False, **options: Any
) -> Callable[[Scene, Mapping[str, Any]], Awaitable[Argument]]:
    async def get(scene: Scene, getter: Mapping[str, Any]) -> Argument:
        path, data = await scene.read_first(paths(scene, file, is_edge))
        return {**scene.file(path, data), "parse": parser, "with": options}

    return get


_PREFERENCES = "Default/Preferences"
FUNCTIONS = {
    "default_search_engine": _profile(
        _PREFERENCES,
        "setting",
        keys=["default_search_provider_data", "template_url_data", "short_name"],
        default="Google",
    ),
    "profile_name": _profile(_PREFERENCES, "setting", keys=["profile", "name"]),
    "chrome_font_size": _profile(_PREFERENCES, "setting", keys=["webkit", "webprefs"], default=_FONTS),
    "chrome_language": _profile("Local State", "setting", keys=["intl", "app_locale"], default="en-US"),
    "enabled_experiments": _profile(
        "Local State", "setting", keys=["browser", "enabled_labs_experiments"], default=[]
    ),
    "enable_do_not_track": _profile(_PREFERENCES, "is_set", keys=[["enable_do_not_track"]]),
    "enable_enhanced_safety_browsing": _profile(
        _PREFERENCES, "is_set", keys=[["safebrowsing", "enhanced"]], default="Google"
    ),
    "enable_safe_browsing": _profile(
        _PREFERENCES, "is_set", keys=[["safebrowsing", "enhanced"], ["safebrowsing", "enabled"]]
    ),
    "new_startup_page": _profile(_PREFERENCES, "opens_new_tab"),
    "find_unpacked_extension_path": _profile(_PREFERENCES, "extensions", key="path"),
    "find_installed_extension_name": _profile(_PREFERENCES, "extensions", key="name"),
    "data_delete_automacally": _profile(_PREFERENCES, "has_site_settings"),
    "bookmarks": _profile("Default/Bookmarks", "setting", keys=["roots"], default=[]),
    "history": _profile("Default/History", "rows", query=_HISTORY),
    "cookie_data": _profile("Default/Cookies", "rows", query=_COOKIES),
    "default_search_engine_from_edge": _profile(_PREFERENCES, "edge_engine", is_edge=True),
    "profile_name_from_edge": _profile(_PREFERENCES, "setting", is_edge=True, keys=["profile", "name"]),
    "edge_font_size": _profile(
        _PREFERENCES, "setting", is_edge=True, keys=["webkit", "webprefs"], default=_EDGE_FONTS
    ),
    "enable_do_not_track_from_edge": _profile(
        _PREFERENCES, "as_number", is_edge=True, keys=["enable_do_not_track"]
    ),
    "enable_enhanced_safety_browsing_from_edge": _profile(
        _PREFERENCES, "as_number", is_edge=True, keys=["edge", "super_duper_secure_mode", "enabled"]
    ),
    "data_delete_automacally_from_edge": _profile(_PREFERENCES, "edge_deletes_on_exit", is_edge=True),
    "favorites": _profile("Default/Bookmarks", "setting", is_edge=True, keys=["roots"], default=[]),
    "history_for_edge": _profile("Default/History", "rows", is_edge=True, query=_HISTORY),
    "cookie_data_for_edge": _profile("Default/Network/Cookies", "rows", is_edge=True, query=_COOKIES),
    "edge_home_page": _profile(
        "Default/Secure Preferences", "edge_text", is_edge=True, keys=["homepage"], is_bare=True
    ),
    "edge_default_download_folder": _profile(
        _PREFERENCES, "edge_text", is_edge=True, keys=["download", "default_directory"]
    ),
}
