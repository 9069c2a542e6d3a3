"""The parts `live` and `faults` of check_h200: one asynchronous run, looked at from outside by the files that it writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_tables import Row, at_most
from check_h200_common import Check, Child, PartFailed, holds, waiting

NUM_UPDATES = 10
ENDLESS = 100_000
"""Steps of a run whose parts are killed: it is ended when that has been seen."""
LAYOUTS = {1: (1, 1), 2: (1, 1), 4: (2, 2), 8: (4, 4)}
"""GPUs -> (tp of the trainer, engines of tp 1)."""
CPU_LAYOUTS = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (4, 4)}
KINDS = ("", "/gui", "/code", "/terminate", "/format_error", "/image", "/text")
LINK = "from bench_rollout_parts import peer_to_peer; print(peer_to_peer('cuda:0', 'cuda:{}'))"


def live(check: Check) -> Iterator[Row]:
    """Ten updates with live desktops: lag, versions, canary, the gap of engines and trainer, busy shares, publishing."""
    run = the_run(check)
    yield from run.ready()
    link = None
    for _ in waiting(check, run.child, f"{NUM_UPDATES} updates"):
        if run.steps() and link is None and not check.is_cpu:
            link = check.start("link", ["-c", LINK.format(check.gpus - 1)])
        if len(run.steps()) >= NUM_UPDATES:
            break
    rows = run.steps()
    yield holds("updates with live desktops", str(len(rows)), len(rows) >= NUM_UPDATES, f">= {NUM_UPDATES}")
    trained = [row for row in rows if not row["loss/is_skipped"]]
    yield holds("updates that moved weights", str(len(trained)), bool(trained), ">= 1")
    yield from run.facts()
    yield from gap_rows(check, rows)
    for name in ("trainer", "engine", "desktops"):
        yield Row(f"busy share, {name}", f"{statistics.fmean(row[f'busy/{name}'] for row in rows):.2f}")
    yield Row("seconds a step, median", f"{statistics.median(row['time/step_s'] for row in rows):.1f}")
    yield from publish_rows(check, run, rows, link)
    if run.num_steps == NUM_UPDATES:
        for _ in waiting(check, run.child, "end of the run"):
            if run.child.process.poll() == 0:
                break
        is_whole = (run.folder / "hf/rl/model.safetensors").is_file()
        yield holds("the run ends by itself and leaves a Hugging Face folder", str(is_whole), is_whole)


def faults(check: Check) -> Iterator[Row]:
    """An engine, then a trainer rank, killed in the live run: seconds until turns and updates go on."""
    run = the_run(check)
    yield from run.ready()
    run.wait_for_step(check, max(2, run.last_step() + 1))
    engines = run.engines()
    if not engines:
        raise PartFailed("no engine's process was found")
    pid = engines[-1]
    killed_s, step = time.time(), run.last_step()
    os.kill(pid, signal.SIGKILL)
    back_s, update_s, turn_s = 0.0, 0.0, 0.0
    for _ in waiting(check, run.child, "engine with the current weights after one was killed", 0.2):
        news = [other for other in run.engines() if other not in engines]
        if not back_s and news and served_version(news[0]) >= step:
            back_s = time.time() - killed_s
        if not update_s and run.last_step() > step:
            update_s = run.steps()[-1]["time_s"] - killed_s
        if back_s and update_s and (turn_s := run.first_answer_s(killed_s)):
            break
    yield Row("engine killed: next turn finished after", f"{turn_s - killed_s:.1f} s")
    yield Row("engine killed: serves current weights again after", f"{back_s:.1f} s")
    yield Row("engine killed: next update finished after", f"{update_s:.1f} s")
    run.wait_for_step(check, run.last_step() + 1)
    killed_s, step = time.time(), run.last_step()
    ranks = run.child.pids("ray::TrainerActor")
    os.kill(ranks[-1], signal.SIGKILL)
    run.wait_for_step(check, step + 1)
    update_s = next(row["time_s"] for row in run.steps() if row["step"] > step) - killed_s
    lost = [json.loads(line) for line in (run.folder / "logs/faults.jsonl").read_text().splitlines()]
    seen_s = next(fault["time_s"] for fault in lost if fault["part"] == "trainer") - killed_s
    yield Row(
        f"1 of {len(ranks)} trainer rank(s) killed: next update finished after",
        f"{update_s:.1f} s (the run, which called no rank before, saw it after {seen_s:.1f} s)",
    )
    yield from run.facts("after both ")
    code, left = run.child.end(check.patience_s), run.child.pids()
    yield holds(
        "the run ends on Ctrl-C and leaves no process",
        f"code {code}, {len(left)} left",
        code == 130 and not left,
    )


class Run:
    """One run of slime_cua.train, as its files tell of it."""

    def __init__(self, check: Check) -> None:
        self._check = check
        number = 1 + sum(1 for _ in check.folder.glob("run_*"))
        self.folder = check.folder / f"run_{number}"
        self.num_steps = ENDLESS if "faults" in check.parts else NUM_UPDATES
        self.child = check.start(
            f"run_{number}",
            [
                "-m",
                "slime_cua.train",
                "--config",
                "recipes/check_h200.yaml",
                *run_keys(check, self.folder, self.num_steps),
            ],
        )
        self._began, self._is_ready = time.monotonic(), False

    def ready(self) -> Iterator[Row]:
        """Waits for the first update; how long the start took, told once."""
        if self._is_ready:
            return
        self.wait_for_step(self._check, 1)
        self._is_ready = True
        yield Row("from the command to the first update", f"{time.monotonic() - self._began:.0f} s")

    def engines(self) -> list[int]:
        """Process ids of its policy servers, the youngest last."""
        name = "rollout.embedded" if self._check.is_cpu else "sglang.launch_server"
        found = self.child.pids(name, but="rollout.engines.lifeline")
        return [pid for pid in found if parent(pid) not in found]

    def wait_for_step(self, check: Check, step: int) -> None:
        for _ in waiting(check, self.child, f"update {step}"):
            if self.last_step() >= step:
                return

    def steps(self) -> list[dict[str, Any]]:
        """The RL rows of metrics.jsonl: names with their values, and step and time_s."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{**row["values"], **row} for row in rows if row["axis"] == "step"]

    def last_step(self) -> int:
        return max((row["step"] for row in self.steps()), default=0)

    def turns(self) -> Iterator[Any]:
        """Turns of all finished episodes."""
        from slime_cua.core.types import Episode
        from slime_cua.data.episodes import EpisodeStore

        for group in EpisodeStore(self.folder / "episodes/rl.jsonl"):
            yield from (turn for episode in group.episodes for turn in episode.turns)
        for path in (self.folder / "episodes/rl_open").glob("*.jsonl"):
            for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
                if line.endswith(b"\n"):
                    yield from Episode.model_validate_json(line).turns

    def first_answer_s(self, since_s: float) -> float:
        """Unix time of the first observation after an answer that came after `since_s`; 0: none yet."""
        ends = (
            turn.observation.time_s
            for turn in self.turns()
            if turn.observation and turn.observation.time_s - turn.timings_s.get("act", 0.0) > since_s
        )
        return min(ends, default=0.0)

    def facts(self, when: str = "") -> Iterator[Row]:
        """Lag and versions of every trained token, from state and episodes; the canary, from the driver's log."""
        lags, num_without = trained_lags(self.folder)
        yield at_most(f"{when}greatest lag of {sum(lags.values())} trained tokens", max(lags), 1)
        yield at_most(
            f"{when}greatest lag that the run logged", max(row["lag/max"] for row in self.steps()), 1
        )
        yield at_most(f"{when}tokens without a version", num_without, 0)
        agreed = (self.folder / "logs/driver.log").read_text().count("engines and trainer agree")
        yield holds(f"{when}canary passed", f"{agreed} times", agreed > 0, "each time, or the run ends")


def run_keys(check: Check, run_dir: Path, num_steps: int) -> list[str]:
    """The keys of the run that follow from GPUs and options, for the command line of slime_cua.train."""
    tp, engines = (CPU_LAYOUTS if check.is_cpu else LAYOUTS)[check.gpus]
    model = check.model if tp <= 2 else with_kv_heads(check.model, check.folder / "policy", tp)
    keys = {
        "run_dir": run_dir,
        "model": model,
        "num_steps": num_steps,
        "trainer.parallel.tp": tp,
        "trainer.parallel.sequence_parallel": str(tp > 1).lower(),
        "rollout.engine.num_engines": engines,
        "rollout.publish.way": "ipc" if check.gpus == 1 and not check.is_cpu else "broadcast",
        "sandbox.gateway_url": check.gateway,
    }
    if not check.has_cold_start:
        keys["sft.num_episodes"] = 0
    if check.is_cpu:
        keys |= {
            "rollout.engine.kind": "embedded",
            "rollout.engine.dtype": "fp32",
            "trainer.dtype": "fp32",
        }
        keys |= {
            "rollout.groups_per_step": 2,
            "rollout.episodes_per_group": 4,
            "rollout.canary.num_prompts": 4,
        }
        keys |= {"sandbox.num_desktops": 6, "sandbox.num_spares": 2, "sandbox.max_boots": 2}
    else:
        keys["rollout.engine.python"] = os.environ.get("SLIME_CUA_SGLANG_PYTHON", "")
        # SGLang captures prefills for 39 s at each start, an engine's restart included; there are few tokens to prefill here.
        keys["rollout.engine.extra_args"] = (
            "[--mem-fraction-static=0.3, --cuda-graph-backend-prefill=disabled]"
        )
    return [f"{name}={value}" for name, value in keys.items() if value != ""]


def the_run(check: Check) -> Run:
    """The run that an earlier part left at work, or a new one."""
    if check.run is None or check.run.child.process.poll() is not None:
        check.run = Run(check)
    found: Run = check.run
    return found


def trained_lags(run_dir: Path) -> tuple[dict[int, int], int]:
    """(sampled tokens of trained groups by age at their update, how many of them name no version)."""
    from slime_cua.data.episodes import EpisodeStore
    from slime_cua.launch.run_state import RunState

    state = RunState.load(run_dir)
    if state is None or not state.batches:
        raise PartFailed(f"{run_dir}/state.json names no update")
    store, lags, num_without = EpisodeStore(run_dir / "episodes/rl.jsonl"), {0: 0}, 0
    for version, batch in enumerate(state.batches):
        groups = [store.read_at(place, name) for name, place in batch.groups.items()]
        turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
        for sampled in (sampled for turn in turns for sampled in turn.response_versions):
            num_without += not 0 <= sampled <= version
            lags[version - sampled] = lags.get(version - sampled, 0) + 1
    return lags, num_without


def gap_rows(check: Check, rows: list[dict[str, Any]]) -> Iterator[Row]:
    """The gap's goals, and its table: a line an update, mean / 99th percentile by kind of token."""
    names = [kind for kind in KINDS if any(f"gap/logp_abs_mean{kind}" in row for row in rows)]
    lines = [
        "Gap of engines and trainer in nats, mean / 99th percentile, by the tokens' action type and by what is before them:",
        "",
    ]
    lines += [
        "| update | " + " | ".join(kind.strip("/") or "all" for kind in names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for row in rows:
        pairs = [(row.get(f"gap/logp_abs_mean{kind}"), row.get(f"gap/logp_abs_p99{kind}")) for kind in names]
        cells = ["-" if None in pair else f"{pair[0]:.2g} / {pair[1]:.2g}" for pair in pairs]
        lines.append(f"| {row['step']} | " + " | ".join(cells) + " |")
    check.tables["live"] = "\n".join(lines)
    means = [row["gap/logp_abs_mean"] for row in rows if "gap/logp_abs_mean" in row]
    if not means:
        raise PartFailed("no update had a token of the current version to compare")
    yield at_most("gap, mean, worst update", max(means), 0.025, "nats")
    yield at_most(
        "gap, 99th percentile, worst update",
        max(row.get("gap/logp_abs_p99", 0.0) for row in rows),
        0.2,
        "nats",
    )


def publish_rows(check: Check, run: Run, rows: list[dict[str, Any]], link: Child | None) -> Iterator[Row]:
    """The pause of a publish, and its rate beside the link's."""
    from slime_cua.launch.preflight import num_parameters

    num_gb = num_parameters(check.model) * (4 if check.is_cpu else 2) / 1e9
    pause_s = statistics.median(row["time/publish_s"] for row in rows)
    yield at_most(
        f"pause of a publish of {1000 * num_gb:.0f} MB, median", pause_s, round(1.0 + 0.1 * num_gb, 2), "s"
    )
    yield Row(
        "rate of a publish over the whole pause, each engine",
        f"{num_gb / pause_s:.2g} GB/s (the policy is too small to fill a link)",
    )
    if link is not None:
        what = "link between two GPUs" if check.gpus > 1 else "copies inside the GPU"
        yield Row(f"{what}, measured", f"{float(check.finish(link).split()[-1]):.0f} GB/s")


def parent(pid: int) -> int:
    """The parent's process id; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def served_version(pid: int) -> int:
    """weight_version of the server with this process id; -1: it does not answer."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_text()
        port = re.search(r"--port=(\d+)", line)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port[1] if port else 0}/model_info", timeout=2
        ) as reply:
            return int(json.load(reply)["weight_version"])
    except (OSError, ValueError, KeyError):
        return -1


def with_kv_heads(source: Path, target: Path, count: int) -> Path:
    """The same policy with each key/value head repeated until there are `count`, so that tp may be `count`."""
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    text = config["text_config"]
    times, rest = divmod(count, text["num_key_value_heads"])
    if rest or text["num_attention_heads"] % count:
        raise PartFailed(f"{source}: its {text['num_key_value_heads']} key/value heads do not become {count}")
    shutil.copytree(source, target, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if re.search(r"language_model.*\.self_attn\.[kv]_proj\.", name) and times > 1:
            heads = tensor.unflatten(0, (text["num_key_value_heads"], -1))
            tensors[name] = heads.repeat_interleave(times, 0).flatten(0, 1).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    text["num_key_value_heads"] = count
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
