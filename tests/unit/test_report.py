"""The report: one file, everything inside it, text escaped."""

import json

import pytest

from slime_cua.core.errors import ConfigError
from slime_cua.observability.logger import MetricsLogger
from slime_cua.observability.report import curves, write_report


def test_report_holds_tables_curves_and_pictures_in_one_file(tmp_path):
    logger = MetricsLogger(tmp_path, wandb_mode="disabled")
    for step in range(3):
        logger.log({"reward/mean": step / 2}, step=step)
    logger.close()
    (tmp_path / "shot.png").write_bytes(b"\x89PNG not looked into")
    (tmp_path / "report_data.json").write_text(
        json.dumps(
            {
                "title": "a run",
                "tables": [{"title": "Success", "columns": ["arm", "value"], "rows": [["sft <b>", "0.5"]]}],
                "films": [{"title": "one", "frames": [{"png": "shot.png", "caption": "left_click (1, 2)"}]}],
            }
        )
    )
    page = write_report(tmp_path).read_text()
    assert "sft &lt;b&gt;" in page, "text is escaped"
    assert "data:image/png;base64," in page
    assert "0.0,100.0 150.0,50.0 300.0,0.0" in page, "a rising line from the lower left to the upper right"
    assert "http" not in page.replace("http-equiv", ""), "nothing is loaded from outside"


def test_flat_and_single_point_series_do_not_break_the_curves():
    rows = [
        {"axis": "step", "step": s, "values": {"reward/mean": 1.0, "loss/policy": "nan"}} for s in range(2)
    ]
    assert [c["name"] for c in curves(rows)] == ["reward/mean"]
    assert curves(rows[:1]) == []


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is it a run directory"):
        write_report(tmp_path)
