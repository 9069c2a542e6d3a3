"""The words that evaluators may use: getters, and desktop-env's metrics. Names only, for the check when a task is loaded.

Source: desktop-env 1.0.2 (`evaluators/getters`, `evaluators/metrics`) and WindowsAgentArena (`desktop_env/evaluators`).
"""

from __future__ import annotations

from sandbox_cluster.judge.metric_names import UPSTREAM

__all__ = ["GETTERS", "REFUSED_GETTERS", "REFUSED_METRICS", "UPSTREAM"]

_CHROME = (
    "default_search_engine", "history", "enabled_experiments", "profile_name", "chrome_language", "chrome_font_size", "bookmarks",
    "enable_do_not_track", "enable_enhanced_safety_browsing", "enable_safe_browsing", "new_startup_page",
    "find_unpacked_extension_path", "find_installed_extension_name", "data_delete_automacally", "cookie_data",
)  # fmt: skip
_EDGE = (
    "default_search_engine_from_edge", "history_for_edge", "profile_name_from_edge", "edge_font_size", "favorites",
    "enable_do_not_track_from_edge", "enable_enhanced_safety_browsing_from_edge", "data_delete_automacally_from_edge",
    "cookie_data_for_edge", "edge_home_page", "edge_default_download_folder",
)  # fmt: skip
GETTERS: dict[str, tuple[str, ...]] = {
    "vm_file": ("path",),
    "cloud_file": ("path",),
    "cache_file": ("path",),
    "content_from_vm_file": ("path", "file_type", "file_content"),
    "vm_command_line": ("command",),
    "vm_command_error": ("command",),
    "vm_terminal_output": (),
    "accessibility_tree": (),
    "vm_screen_size": (),
    "vm_window_size": ("app_class_name",),
    "vm_wallpaper": (),
    "list_directory": ("path",),
    "rule": ("rules",),
    "rule_relativeTime": ("rules",),
    "time_diff_range": ("diff_range_in_minutes",),
    "vlc_playing_info": (),
    "vlc_config": (),
    "default_video_player": (),
    "gimp_config_file": ("file_name",),
    "vscode_config": ("vscode_extension_command", "path"),
    "audio_in_slide": ("ppt_file_path", "slide_index"),
    "background_image_in_slide": ("ppt_file_path", "slide_index"),
    "shortcuts_on_desktop": (),
    "url_shortcuts_on_desktop": (),
    "open_tabs_info": (),
    "active_url_from_accessTree": (),
    "active_tab_info": (),
    "active_tab_html_parse": ("category",),
    "active_tab_url_parse": ("parse_keys",),
    "url_dashPart": ("partIndex", "returnType"),
    "page_info": ("url",),
    "pdf_from_url": ("path",),
    "info_from_website": ("url", "infos"),
    "gotoRecreationPage_and_get_html_content": ("class",),
    "macys_product_url_parse": ("parse_keys",),
    "url_path_parse": ("parse_keys",),
    **dict.fromkeys((*_CHROME, *_EDGE), ()),
    "vm_file_exists_in_vm_folder": ("folder_name", "file_name"),
    "vm_file_exists_in_desktop": ("file_name",),
    "vm_folder_exists_in_documents": ("folder_name",),
    "is_file_desktop": ("filename",),
    "is_file_saved_desktop": ("filename", "textcontent"),
    "is_files_moved_downloads": ("folder_name", "file_name"),
    "vm_active_window_title": (),
    "image_dimension_matches_input": ("filepath", "width", "height"),
    "is_all_docx_in_archive": ("folder_path",),
    "all_png_file_names": ("folder_path", "file_path"),
    "is_file_hidden": ("file_path",),
    "is_details_view": ("folder_path",),
    "are_files_sorted_by_modified_time": ("directory",),
    "is_directory_read_only_for_user": ("directory", "user"),
    "check_if_timer_started": ("hours", "minutes", "seconds"),
    "check_if_world_clock_exists": ("city", "country"),
    "vm_library_folders": ("library_name",),
    "are_all_images_tagged": ("directory", "tag"),
    "is_red_circle_present_on_canvas": ("filepath",),
    "zipped_folder_in_desktop": ("filename", "password"),
    "desktop_background": (),
    "system_notifications": (),
    "storage_sense_run_frequency": (),
    "night_light_state": (),
    "system_timezone": (),
    "validate_pwa_installed": (),
}
"""Getter -> parameters that must be there."""
_ACCOUNT = "it needs a Google account"
REFUSED_GETTERS: dict[str, str] = {
    "googledrive_file": _ACCOUNT,
    "replay": "it acts instead of looking; use postconfig",
    "conference_city_in_order": "it reads a file of the caller's machine; use vm_file and compare_conference_city_in_order",
    "calc_insensitive_md5": "no version of OSWorld has it",
}
"""Getter -> why this build does not have it."""
REFUSED_METRICS: dict[str, str] = {
    "compare_image_text": "it reads text from pictures by easyocr, which needs torch",
    "check_qt_video_resize": "only WindowsAgentArena has it",
    "is_url_shortcut_on_desktop": "only WindowsAgentArena has it",
    "check_edge_font_size": "only WindowsAgentArena has it",
}
"""Metric -> why this build does not have it."""
