"""The one-page HTML report of a run: tables, curves, film strips of episodes, config. No server, no script, one file.

Reads RUN/metrics.jsonl, RUN/config.yaml and RUN/report_data.json (tables and film strips, written by the evaluation).
"""

from __future__ import annotations

import argparse
import base64
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from slime_cua.core.errors import ConfigError
from slime_cua.core.files import write_atomic
from slime_cua.observability.logger import read_rows
from slime_cua.observability.metrics import METRICS

REPORT_DATA = "report_data.json"
"""{"title", "subtitle", "tables": [{"title", "note", "columns", "rows"}], "films": [{"title", "frames": [{"png", "caption"}]}]}"""


def write_report(run_dir: Path) -> Path:
    """RUN/report.html from what the run has written so far; raises ConfigError when nothing is there."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    rows = read_rows(run_dir / "metrics.jsonl")
    data_path = run_dir / REPORT_DATA
    data: dict[str, Any] = json.loads(data_path.read_text()) if data_path.exists() else {}
    if not rows and not data:
        raise ConfigError(f"{run_dir} holds no metrics.jsonl and no {REPORT_DATA}: is it a run directory?")
    config = run_dir / "config.yaml"
    page = (
        Environment(
            loader=PackageLoader("slime_cua.observability"), autoescape=select_autoescape(default=True)
        )
        .get_template("report.html.jinja")
        .render(
            title=data.get("title", f"slime_cua run {run_dir.name}"),
            subtitle=data.get("subtitle", ""),
            tables=data.get("tables", []),
            curves=curves(rows),
            films=[_film(film, run_dir) for film in data.get("films", [])],
            config=config.read_text() if config.exists() else "",
        )
    )
    target = run_dir / "report.html"
    write_atomic(target, page.encode())
    return target


def curves(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Headline metrics with at least two finite points, as SVG polylines in a 300 x 100 box (y up)."""
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        for name, value in row["values"].items():
            if isinstance(value, int | float):
                points[name].append((float(row["step"]), float(value)))
    result = []
    for metric in METRICS:
        series = sorted(points.get(metric.name, []))
        if not metric.is_headline or len(series) < 2:
            continue
        xs, ys = [x for x, _ in series], [y for _, y in series]
        low, high = min(ys), max(ys)
        width, height = (xs[-1] - xs[0]) or 1.0, (high - low) or 1.0
        line = " ".join(
            f"{300 * (x - xs[0]) / width:.1f},{100 - 100 * (y - low) / height:.1f}" for x, y in series
        )
        result.append(
            {
                "name": metric.name,
                "unit": metric.unit,
                "meaning": metric.meaning,
                "axis": metric.axis,
                "lines": [line],
                "low": f"{low:.4g}",
                "high": f"{high:.4g}",
                "last": f"{ys[-1]:.4g}",
                "first_step": int(xs[0]),
                "last_step": int(xs[-1]),
            }
        )
    return result


def _film(film: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    frames = []
    for frame in film["frames"]:
        png = run_dir / frame["png"] if frame.get("png") else None
        src = ""
        if png is not None and png.exists():
            src = "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode()
        frames.append({"src": src, "caption": frame.get("caption", "")})
    return {"title": film["title"], "frames": frames}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="slime-cua report", description="Write RUN/report.html.")
    parser.add_argument("run_dir", type=Path)
    print(write_report(parser.parse_args(argv).run_dir))
    return 0
