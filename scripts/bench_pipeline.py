"""Compares schedules by replay, and the replay with the live stack.

    PYTHONPATH=. python scripts/bench_pipeline.py compare --out docs/pipeline_tables.md    every preset, every schedule: minutes
    PYTHONPATH=. python scripts/bench_pipeline.py live                                     the same short trace on both: a minute

`live` starts a gateway and a host with fake desktops, and exits with 1 when the replay's throughput is more than 10 %
from the live one's. A busy machine makes the live stack slower than what is compared: see the load that is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from rollout.replay.policies import DEFAULT, FORESIGHT, OPTIONS, POLICIES
from rollout.replay.scenario import PRESETS, ScenarioConfig, SiteConfig
from slime_cua.launch.simulate import GeneratedTrace, compare

TOLERANCE = 0.10
MODEL = Path("models/tiny_base")


def scenarios(num_steps: int) -> list[tuple[str, ScenarioConfig, list[str]]]:
    """(heading, scenario, policies)."""
    long_tail, short, large = (PRESETS[name]() for name in ("long_tail", "short", "large"))
    equal = SiteConfig(step_token_share=0.0)
    every = [*DEFAULT, *FORESIGHT, *OPTIONS]
    ours = ["sync", "one_step_off", "ours_1", "ours_1_ahead", "foreseeing_64"]
    steps = {"num_steps": num_steps}
    return [
        ("Episodes of 20 s to 40 min, 32 GPUs, 128 desktops", long_tail.model_copy(update=steps), every),
        (
            "The same with equal steps (there the bound for a start order is exact)",
            long_tail.model_copy(update={**steps, "site": equal}),
            ours,
        ),
        ("The longest episode is shorter than one step", short.model_copy(update=steps), list(DEFAULT)),
        ("4,096 desktops, 512 engines, 256 groups a step", large, ["ours_1", "ours_1_ahead"]),
    ]


def run_compare(num_steps: int, out: Path | None) -> int:
    parts = []
    for heading, scenario, names in scenarios(num_steps):
        begun = time.monotonic()
        text = compare(scenario, GeneratedTrace(scenario), names)
        parts.append(f"## {heading}\n\n{text}\n")
        print(parts[-1], f"({time.monotonic() - begun:.0f} s)", sep="\n", flush=True)
    if out is not None:
        out.write_text("\n".join(parts))
    return 0


def run_live(name: str, model: Path) -> int:
    from slime_cua.launch.live_replay import live_and_replayed

    live, replayed = live_and_replayed(POLICIES[name], model)
    print(
        f"| {POLICIES[name].name}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores | live | replay |\n|---|---|---|"
    )
    for title, values in (
        ("seconds", (live.seconds, replayed.seconds)),
        ("groups/h", (live.groups_per_hour, replayed.groups_per_hour)),
        ("trainer waits, %", (100 * live.trainer_idle, 100 * replayed.trainer_idle)),
        ("engines busy, %", (100 * live.busy["engines"], 100 * replayed.busy["engines"])),
        ("greatest lag", (max(live.lag_tokens), max(replayed.lag_tokens))),
    ):
        print(f"| {title} | {values[0]:.1f} | {values[1]:.1f} |")
    gap = replayed.groups_per_hour / live.groups_per_hour - 1
    print(f"\nThe replay's throughput is {gap:+.1%} from the live stack's (goal: within {TOLERANCE:.0%}).")
    return int(abs(gap) > TOLERANCE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    compares = commands.add_parser("compare")
    compares.add_argument("--num-steps", type=int, default=100)
    compares.add_argument("--out", type=Path)
    lives = commands.add_parser("live")
    lives.add_argument("--policy", choices=sorted(POLICIES), default="ours_1")
    lives.add_argument(
        "--model", type=Path, default=MODEL, help="checkpoint folder; only its tokenizer is used"
    )
    options = parser.parse_args()
    if options.command == "compare":
        return run_compare(options.num_steps, options.out)
    return run_live(options.policy, options.model)


if __name__ == "__main__":
    sys.exit(main())
