"""`slime-cua simulate`: replay a trace under several schedules on a virtual clock, in seconds instead of days.

slime-cua simulate                                     16 + 16 GPUs, 128 desktops, episodes of 20 s to 40 min
slime-cua simulate --trace runs/quickstart             what a run recorded
slime-cua simulate --trace scenario.yaml num_steps=50 site.num_desktops=256
slime-cua simulate --preset short --policies sync,ours_1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from omegaconf import OmegaConf

from rollout.replay.bound import idle_bound
from rollout.replay.generate import GeneratedTrace
from rollout.replay.policies import DEFAULT, FORESIGHT, OPTIONS, POLICIES
from rollout.replay.report import comparison, goals, trace_text
from rollout.replay.scenario import PRESETS, ScenarioConfig
from rollout.replay.simulate import Replay, mean_step_tokens, simulate
from rollout.replay.trace import Trace, measured_scenario, read_trace
from slime_cua.config.base import load, validate
from slime_cua.core.errors import ConfigError


def scenario_and_trace(path: Path | None, preset: str, overrides: list[str]) -> tuple[ScenarioConfig, Trace]:
    """From a scenario YAML, a run directory or episodes JSONL; without a path the preset. Raises ConfigError."""
    if path is not None and not path.exists():
        raise ConfigError(f"--trace {path}: there is no such file or folder")
    if path is not None and path.suffix in (".yaml", ".yml"):
        scenario = load(ScenarioConfig, path, overrides)
    else:
        base = PRESETS[preset]()
        if path is not None:
            base = measured_scenario(base, path).model_copy(update={"recorded": str(path), "name": str(path)})
        merged = OmegaConf.merge(
            OmegaConf.create(base.model_dump(mode="json")), OmegaConf.from_dotlist(overrides)
        )
        scenario = validate(ScenarioConfig, OmegaConf.to_container(merged), "command line")
    if scenario.recorded:
        return scenario, read_trace(Path(scenario.recorded))
    return scenario, GeneratedTrace(scenario)


def chosen(text: str) -> list[str]:
    """Policy names of --policies. Raises ConfigError for an unknown one."""
    names = {"default": list(DEFAULT), "all": [*DEFAULT, *FORESIGHT, *OPTIONS]}.get(text) or text.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(
                f"--policies: no policy {name!r}; there are {', '.join(POLICIES)}, default, all"
            )
    return names


def compare(scenario: ScenarioConfig, trace: Trace, names: list[str]) -> str:
    """The whole report of a comparison, Markdown."""
    replays: list[Replay] = [simulate(trace, scenario, POLICIES[name]) for name in names]
    mean = mean_step_tokens(trace, scenario)
    bounds = {
        r.policy.name: idle_bound(r.admitted, r.trained, scenario, r.policy.max_lag, mean)
        for r in replays
        if r.policy.max_lag is not None and r.policy.has_no_discard
    }
    parts = [trace_text(trace, scenario), comparison(replays, bounds), goals(replays, bounds)]
    return "\n\n".join(part for part in parts if part)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="slime-cua simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, help="scenario YAML, run directory, or episodes JSONL")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="long_tail", help="without a scenario YAML"
    )
    parser.add_argument("--policies", default="default", help=f"default, all, or of: {', '.join(POLICIES)}")
    parser.add_argument("--out", type=Path, help="write the report there, too")
    parser.add_argument("overrides", nargs="*", help="key=value, dotted, e.g. site.num_desktops=256")
    arguments = parser.parse_args(argv)
    names = chosen(arguments.policies)
    scenario, trace = scenario_and_trace(arguments.trace, arguments.preset, arguments.overrides)
    text = compare(scenario, trace, names)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0
