"""Metrics: the table is the API, and a resumed run has one point a step."""

import json
from pathlib import Path

import pytest

from slime_cua.observability.logger import MetricsLogger, read_rows
from slime_cua.observability.metrics import METRICS, find, markdown_table, over_steps


def open_logger(folder, **kwargs):
    return MetricsLogger(folder, wandb_mode="disabled", **kwargs)


def test_unlisted_name_is_refused(tmp_path):
    logger = open_logger(tmp_path)
    with pytest.raises(ValueError, match="METRICS"):
        logger.log({"reward/avrage": 1.0}, step=0)
    with pytest.raises(ValueError, match="axis"):
        logger.log({"sft/loss": 1.0}, step=0)
    logger.close()


def test_names_are_unique_and_patterns_match_one_family():
    names = [m.name for m in METRICS]
    assert len(names) == len(set(names))
    assert find("loss/clip_fraction/code").meaning.startswith("steps of a type")
    assert find("nothing/here") is None


def test_docs_table_is_the_code_table():
    assert markdown_table() in Path("docs/metrics.md").read_text()


def test_resume_overlap_keeps_one_point_a_step_and_the_new_one_wins(tmp_path):
    first = open_logger(tmp_path)
    for step in range(213):
        first.log({"reward/mean": 0.0}, step=step)
    first.close()
    second = open_logger(tmp_path, resume_step=200)
    for step in range(201, 231):
        second.log({"reward/mean": 1.0}, step=step)
    second.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(231))
    assert all(row["values"]["reward/mean"] == (row["step"] > 200) for row in rows)


def test_not_a_number_is_kept_visible_and_a_cut_last_line_is_left_out(tmp_path):
    logger = open_logger(tmp_path)
    logger.log({"loss/policy": float("nan")}, step=0)
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"axis": "step", "st')
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert json.dumps(rows[0]["values"]) == '{"loss/policy": "nan"}'
    assert len(rows) == 1


def test_several_steps_become_one_row():
    first = {"time/train_s": 1.0, "loss/policy": 2.0, "loss/num_samples": 3.0, "lag/max": 1.0}
    second = {
        "time/train_s": 2.0,
        "loss/policy": 4.0,
        "loss/num_samples": 5.0,
        "lag/max": 0.0,
        "loss/kl": 7.0,
    }
    assert over_steps([first, second]) == {
        "time/train_s": 3.0,
        "loss/policy": 3.0,
        "loss/num_samples": 8.0,
        "lag/max": 1.0,
        "loss/kl": 7.0,
    }
