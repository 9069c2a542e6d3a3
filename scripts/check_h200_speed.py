"""The part `mfu` of check_h200: scripts/bench_train.py and bench_logprob.py under the highest tensor parallelism that is asked of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from bench_tables import Row, at_least
from check_h200_common import ROOT, Check, Child, PartFailed

GOALS = {1: (50.0, 40.0), 2: (45.0, 36.0), 4: (42.0, 34.0)}
"""tp -> percent of the measured bf16 matrix rate (without recompute, with full recompute)."""
MOST_LAYERS = 32
"""Of the 60 that fit at TP=4 with full recompute: more would take the part's time and change nothing in a layer."""
VOCAB = 248_320
LOGITS = 32_768 * 62_080
"""Of the head's shape: rows times the rank's share of the vocabulary."""


def mfu(check: Check) -> Iterator[Row]:
    """Utilisation at the widths of Qwen3.5-27B, then the head's share of the vocabulary on one GPU."""
    tp = min(check.gpus, 2 if check.is_cpu else 4)
    is_apart = check.gpus >= 2 * tp
    running: list[tuple[str, float, Child]] = []
    for place, recompute in enumerate(("none", "full")):
        gpus = range(tp * place, tp * (place + 1)) if is_apart else range(tp)
        child = start(check, tp, recompute, ",".join(map(str, gpus)))
        running.append((recompute, GOALS[tp][place], child))
        if not is_apart:
            yield from rows_of(check, tp, running.pop())
    for entry in running:
        yield from rows_of(check, tp, entry)
    if check.is_cpu:
        yield Row("linear_logprob", "not timed: it needs a GPU")
        return
    vocab = VOCAB // tp
    shape = f"{LOGITS // vocab}x5120x{vocab}"
    said = check.finish(
        check.start("logprob", [str(ROOT / "scripts/bench_logprob.py"), "--shapes", shape, "--no-peers"])
    )
    for way in ("ours fast", "ours lean"):
        found = re.search(rf"\| {way} \| ([\d.]+) \| ([\d.]+) \| ([\d.]+)", said)
        value = f"{found[1]} ms, {found[2]} x, {found[3]} GiB extra" if found else "failed; see the log"
        yield Row(
            f"linear_logprob {shape}, {way.split()[1]}, against three bare products",
            value,
            "" if found else "a figure",
            None if found else False,
        )


def start(check: Check, tp: int, recompute: str, gpus: str) -> Child:
    """bench_train.py on `gpus`: everything switched on, three timed steps."""
    out = check.folder / f"mfu_{recompute}.jsonl"
    out.unlink(missing_ok=True)
    command = [
        str(ROOT / "scripts/bench_train.py"),
        "--tp",
        str(tp),
        "--recompute",
        recompute,
        "--variants",
        "all",
    ]
    command += [
        "--steps",
        "3",
        "--warmup",
        "0",
        "--out",
        str(out),
        "--scratch",
        f"{gettempdir()}/check_h200/{recompute}",
    ]
    if tp == 4 and recompute == "full":
        command += ["--layers", str(MOST_LAYERS)]
    if tp > 1:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp), *command]
    environment = {} if check.is_cpu else {"CUDA_VISIBLE_DEVICES": gpus}
    return check.start(f"mfu_{recompute}", [*command, *(["--tiny"] if check.is_cpu else [])], **environment)


def rows_of(check: Check, tp: int, entry: tuple[str, float, Child]) -> Iterator[Row]:
    """What one of them found, against its goal."""
    recompute, goal, child = entry
    what = f"MFU, TP={tp}, recompute {recompute}, percent of the bf16 matrix rate"
    try:
        check.finish(child)
        found = table_row(check.folder / f"mfu_{recompute}.jsonl")
    except PartFailed as error:
        yield Row(what, f"failed: {error}", f">= {goal:g}", False)
        return
    seconds = sorted(found["times"])[len(found["times"]) // 2]
    if not check.is_cpu:
        yield at_least(what, 100 * found["rate"] / found["matrix_rate"], goal)
    predicted = sum(found["predicted"].values())
    yield Row(
        f"... recompute {recompute}: layers, tokens a micro-batch, tokens/s, matrix rate, memory",
        f"{found['layers']}, {found['max_tokens']}, {found['tokens'] / seconds:,.0f}, {found['matrix_rate'] / 1e12:.0f} TFLOP/s, "
        f"{found['peak'] / 2**30:.1f} GiB ({predicted / 2**30:.1f} predicted)",
    )


def table_row(path: Path) -> dict[str, Any]:
    """The row of the variant `all` that bench_train wrote. Raises PartFailed when it failed, or is not there."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    found = next((row for row in rows if row.get("variant") == "all"), None)
    if found is None or "failure" in found:
        raise PartFailed(found["failure"] if found else f"{path} has no row")
    return found
