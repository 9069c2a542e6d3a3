"""Metrics of desktop-env 1.0.2 by name: their module and how many arguments they must have. See kinds."""

from __future__ import annotations

_NAMES: dict[tuple[str, int], str] = {
    ("basic_os", 1): "check_text_enlarged is_utc_0",
    ("basic_os", 2): "check_gnome_favorite_apps check_moved_jpgs is_in_vm_clickboard",
    ("chrome", 2): (
        "check_enabled_experiments check_font_size check_history_deleted compare_archive compare_htmls "
        "compare_pdf_images compare_pdfs is_added_to_steam_cart is_cookie_deleted is_expected_active_tab "
        "is_expected_active_tab_approximate is_expected_bookmarks is_expected_installed_extensions "
        "is_expected_search_query is_expected_tabs is_expected_url_pattern_match is_shortcut_on_desktop"
    ),
    ("docs", 1): (
        "evaluate_alignment evaluate_conversion evaluate_spacing get_unique_train_ids "
        "has_page_numbers_in_footers is_first_line_centered"
    ),
    ("docs", 2): (
        "check_highlighted_words check_italic_font_size_14 check_no_duplicates check_tabstops "
        "compare_contains_image compare_docx_files compare_docx_files_and_ignore_new_lines "
        "compare_docx_images compare_docx_lines compare_docx_tables compare_font_names "
        "compare_highlighted_text compare_init_lines compare_insert_equation compare_line_spacing "
        "compare_references compare_subscript_contains compare_unique_train_records contains_page_break "
        "evaluate_colored_words_in_tables evaluate_strike_through_last_paragraph find_default_font"
    ),
    ("general", 2): (
        "check_accessibility_tree check_csv check_direct_json_object check_include_exclude check_json "
        "check_line_number check_list compare_python_pure_text compare_terminal_and_txt "
        "compare_time_in_speedtest_results diff_text_file exact_match file_contains fuzzy_match "
        "fuzzy_place_math is_gold_text_included_in_pdf is_in_list is_included_all_json_objects literal_match "
        "match_in_list run_sqlite3"
    ),
    ("gimp", 1): "check_textbox_on_leftside check_triangle_position",
    ("gimp", 2): (
        "check_brightness_decrease_and_structure_sim check_config_status "
        "check_contrast_increase_and_structure_sim check_file_exists check_file_exists_and_structure_sim "
        "check_green_background check_image_file_size check_image_mirror check_image_size "
        "check_palette_and_structure_sim check_saturation_increase_and_structure_sim check_sharper "
        "check_structure_sim check_structure_sim_resized compare_image_list compare_triangle_positions "
        "decrease_brightness increase_saturation"
    ),
    ("libreoffice", 2): "check_libre_locale",
    ("others", 2): "check_mp3_meta compare_epub",
    ("pdf", 2): "check_pdf_pages",
    ("slides", 1): (
        "check_left_panel check_presenter_console_disable check_slide_numbers_color "
        "check_slide_orientation_Portrait"
    ),
    ("slides", 2): (
        "check_auto_saving_time check_image_stretch_and_center check_page_number_colors check_strikethrough "
        "check_transition compare_pptx_files evaluate_presentation_fill_to_rgb_distance"
    ),
    ("table", 1): "compare_table",
    ("table", 2): "compare_conference_city_in_order compare_csv",
    ("thunderbird", 2): "check_thunderbird_filter check_thunderbird_folder check_thunderbird_prefs",
    ("vlc", 2): (
        "check_global_key_play_pause check_one_instance_when_started_from_file check_qt_bgcone "
        "check_qt_max_volume check_qt_minimal_view check_qt_slider_colours compare_audios compare_images "
        "compare_videos is_vlc_fullscreen is_vlc_playing is_vlc_recordings_folder"
    ),
    ("vscode", 1): "check_html_background_image",
    ("vscode", 2): (
        "check_json_keybindings check_json_settings check_python_file_by_gold_file "
        "check_python_file_by_test_suite compare_answer compare_config compare_result_files compare_text_file "
        "compare_zip_files is_extension_installed"
    ),
}
UPSTREAM: dict[str, tuple[str, int]] = {
    name: place for place, names in _NAMES.items() for name in names.split()
}
"""Metric -> (module, arguments it must have)."""
