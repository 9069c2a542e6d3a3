"""Runs the parts of check_h200.sh one after the other and keeps the report; the options are at the head of that script."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from bench_tables import Row
from check_h200_common import ROOT, Check, PartFailed

from slime_cua.core.files import write_atomic

BUDGET_S = {"live": 210, "faults": 110, "layouts": 80, "mfu": 130}
"""Parts share the time in this relation, whatever is not used goes to later ones; the sum stays below nine minutes."""
CPU_SLOWNESS = 4
PROBE = "import torch; n = torch.cuda.device_count(); print(n, torch.cuda.get_device_name() if n else '')"
MARKS = {True: "met", False: "MISSED", None: ""}


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every goal is met, 1 when not, 2 for bad input."""
    options = arguments(argv)
    check = Check(
        gpus=options.gpus,
        folder=options.folder.absolute(),
        parts=options.parts,
        python=sys.executable,
        is_cpu=os.environ.get("SLIME_CUA_CHECK_DEVICE") == "cpu",
        gateway=options.gateway,
        model=(options.model or ROOT / "models/tiny_base").absolute(),
        has_cold_start=options.model is None,
    )
    if fault := missing(check):
        print(f"check_h200: {fault}", file=sys.stderr)
        return 2
    from slime_cua.launch.signals import interrupt_on_signals

    try:
        check.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(
            f"check_h200: {check.folder} cannot be made ({error.strerror}): give another folder",
            file=sys.stderr,
        )
        return 2
    slowness = CPU_SLOWNESS if check.is_cpu else 1
    total_s = 60 * options.minutes or slowness * sum(BUDGET_S.values())
    end_s = time.monotonic() + total_s
    is_good = True
    try:
        with interrupt_on_signals():
            for place, part in enumerate(check.parts):
                later = check.parts[place + 1 :]
                check.end_s = end_s - total_s * share_of(later, check.parts)
                is_good &= all(row.is_met is not False for row in measured(part, check))
                if not {"live", "faults"} & set(later):
                    check.close()  # the run, where a part failed and left it
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        is_good = False
    finally:
        check.close()
    print(f"\n{check.folder}/report.md")
    return 0 if is_good else 1


def share_of(some: Sequence[str], parts: Sequence[str]) -> float:
    """Of the time of `parts`, what is kept for `some` of them."""
    return sum(BUDGET_S[name] for name in some) / sum(BUDGET_S[name] for name in parts)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. A bad one ends the program with a sentence."""
    parser = argparse.ArgumentParser(
        prog="check_h200", description=__doc__, usage="see recipes/check_h200.sh"
    )
    parser.add_argument("gpus", type=int, choices=(1, 2, 4, 8))
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--gateway", default="")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--minutes", type=float, default=0.0)
    options = parser.parse_intermixed_args(argv)
    options.parts = options.parts or list(BUDGET_S)
    if unknown := [part for part in options.parts if part not in BUDGET_S]:
        parser.error(f"no part {unknown[0]!r}: choose from {', '.join(BUDGET_S)}")
    if not 0 <= options.minutes < 1e6:
        parser.error(f"--minutes {options.minutes:g}: give a number above 0")
    return options


def missing(check: Check) -> str:
    """What keeps the check from starting, as a sentence with the way out; empty when nothing does."""
    at = next(path for path in (check.folder, *check.folder.parents) if path.exists())
    if not at.is_dir():
        return f"{at} is a file: give a folder for the results"
    if not (check.model / "config.json").is_file():
        return f"--model {check.model} holds no config.json: give a Hugging Face folder"
    if check.gateway and not os.environ.get("SLIME_CUA_GATEWAY_TOKEN"):
        return "--gateway needs the client's token in SLIME_CUA_GATEWAY_TOKEN"
    number, _, device = output([check.python, "-c", PROBE]).partition(" ")
    if not number.isdigit():
        return f"{check.python} has no torch: run bash scripts/env.sh, or set SLIME_CUA_PYTHON to an interpreter that has"
    if check.is_cpu:
        return ""
    check.device = device
    if int(number) == 0:
        return "no GPU is seen by torch here: SLIME_CUA_CHECK_DEVICE=cpu runs the same code without one"
    if int(number) < check.gpus:
        return f"{number} GPU(s) are here and {check.gpus} were asked for: give {number} or less"
    needs_engine = {"live", "faults"} & set(check.parts)
    sglang = os.environ.get("SLIME_CUA_SGLANG_PYTHON") or check.python
    if needs_engine and output(
        [sglang, "-c", "import importlib.util as u; print(u.find_spec('sglang'))"]
    ) in ("", "None"):
        return f"{sglang} has no SGLang: set SLIME_CUA_SGLANG_PYTHON to an interpreter that has, or leave live and faults out"
    return ""


def output(command: Sequence[str]) -> str:
    """The last line that a command prints; empty when it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ran.stdout.strip().splitlines()[-1] if ran.returncode == 0 and ran.stdout.strip() else ""


def part_of(name: str) -> Callable[[Check], Iterable[Row]]:
    """The function that yields a part's rows as they are found."""
    if name in ("live", "faults"):
        import check_h200_live

        return getattr(check_h200_live, name)
    if name == "layouts":
        import check_h200_layouts

        return check_h200_layouts.layouts
    import check_h200_speed

    return check_h200_speed.mfu


def measured(part: str, check: Check) -> list[Row]:
    """The rows of a part, printed as they come and kept at its end; a failure is the last one."""
    print(
        f"\n== {part}, {check.gpus} {'rank(s) on CPU' if check.is_cpu else 'GPU(s)'}, {check.left_s():.0f} s at most",
        flush=True,
    )
    rows: list[Row] = []
    began = time.monotonic()

    def add(row: Row) -> None:
        rows.append(row)
        print(
            f"{MARKS[row.is_met]:6} {row.name}: {row.value}{f' (goal {row.goal})' if row.goal else ''}",
            flush=True,
        )

    try:
        for row in part_of(part)(check):
            add(row)
    except Exception as error:
        is_ours = isinstance(error, PartFailed)
        add(Row("failed", str(error) if is_ours else f"{type(error).__name__}: {error}", "no failure", False))
    finally:
        add(Row("time of the part", f"{time.monotonic() - began:.0f} s"))
        keep(check, part, rows)
    return rows


def keep(check: Check, part: str, rows: Sequence[Row]) -> None:
    """FOLDER/results.json and report.md with this part's rows in place of its earlier ones on as many GPUs."""
    path = check.folder / "results.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    found[f"{part}, {check.gpus} x {check.device}"] = {
        "rows": [asdict(row) for row in rows],
        "table": check.tables.get(part, ""),
    }
    write_atomic(path, json.dumps(found, indent=1).encode())
    lines = ["# check_h200", ""]
    for title, entry in found.items():
        lines += [f"## {title}", "", "| what | found | goal | |", "|---|---|---|---|"]
        for row in entry["rows"]:
            cells = (row["name"], row["value"], row["goal"], MARKS[row["is_met"]])
            lines.append(
                "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"
            )
        lines += ["", *([entry["table"], ""] if entry["table"] else [])]
    write_atomic(check.folder / "report.md", "\n".join(lines).encode())


if __name__ == "__main__":
    sys.exit(main())
