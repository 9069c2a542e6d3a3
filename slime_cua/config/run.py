"""The whole config of a run: one section an owner. A component gets its section, never this."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from slime_cua.config.algo import AdvantageConfig, FrontierConfig, LossConfig
from slime_cua.config.base import ConfigModel
from slime_cua.config.pool import PoolConfig
from slime_cua.config.rollout import RolloutConfig
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.config.trainer import OptimizerConfig, TrainerConfig


class TaskConfig(ConfigModel):
    train: tuple[str, ...] = ()
    """Folders or files of task JSON."""
    demonstrations: tuple[str, ...] = ()
    """What the cold start's teacher shows; empty: the tasks of `train`. Tasks of their own leave RL tasks that no policy knows by heart."""
    heldout: tuple[str, ...] = ()


class TeacherConfig(ConfigModel):
    """How the scripted teacher (slime_cua.sft.teacher) demonstrates."""

    route_weights: dict[str, float] = {"gui": 1.0, "keys": 0.5, "bash": 1.0, "python": 0.0}
    """Of a task's ways one is drawn with these weights; ways not named have 0. All zero: the task's first way."""
    error_rate: float = Field(0.0, ge=0, le=1)
    """Share of episodes spoiled: the plausible wrong attempt, or the solution without its last effective action.
    They score 0; a filter on the score drops them, so they reach SFT only where it is off."""
    detour_rate: float = Field(0.0, ge=0, le=1)
    """Chance before each action of a harmless extra one (a wait): longer demonstrations that still score 1."""


class SftConfig(ConfigModel):
    num_episodes: int = Field(0, ge=0)
    """Demonstrations to collect with the scripted teacher; 0 skips the cold start."""
    num_epochs: int = Field(1, ge=1)
    minutes: float = Field(0.0, ge=0)
    """Train for this long instead of num_epochs; 0: num_epochs."""
    batch_size: int = Field(16, ge=1)
    """Segments an optimiser step."""
    save_every: int = Field(50, ge=1)
    """Steps between checkpoints of the cold start; an interrupted one goes on from the last."""
    min_rule_score: float = 0.8
    teacher: TeacherConfig = TeacherConfig()
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)


class EvalConfig(ConfigModel):
    num_tasks: int = Field(0, ge=0)
    """0: all held-out tasks. Fewer: the same number of each family."""
    num_attempts: int = Field(1, ge=1)
    """Episodes a task."""
    temperature: float = Field(0.5, gt=0)
    num_bootstrap: int = Field(10000, ge=100)
    arms: tuple[Literal["base", "sft", "rl"], ...] = ("base", "sft", "rl")
    """What is scored on held-out tasks: the model given, after the cold start, after RL."""
    is_image_blank: bool = False
    """Every screenshot of the run replaced by a grey one: what is still solved does not come from the screen."""


class FaultConfig(ConfigModel):
    """What a run mends by itself, and when it gives up. A part that is lost (trainer rank, rollout side, engine, gateway,
    host) is started again; each time counts."""

    max_failures: int = Field(5, ge=1)
    """So many failures within window_minutes stop the run with a report."""
    window_minutes: float = Field(60.0, gt=0)


class LogConfig(ConfigModel):
    project: str = "slime_cua"
    wandb_mode: str = "offline"


class RunConfig(ConfigModel):
    run_dir: str = "runs/default"
    model: str = ""
    """Hugging Face checkpoint folder to start from."""
    seed: int = 0
    num_steps: int = Field(1000, ge=0)
    save_every: int = Field(10, ge=1)
    minutes: float = Field(0.0, ge=0)
    """Stop RL after this long; 0: no limit."""
    tasks: TaskConfig = TaskConfig()
    sandbox: SandboxConfig = SandboxConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    sampler: FrontierConfig = FrontierConfig()
    sft: SftConfig = SftConfig()
    evaluation: EvalConfig = EvalConfig()
    pool: PoolConfig = PoolConfig()
    faults: FaultConfig = FaultConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _one_step_where_old_weights_are_kept(self) -> RunConfig:
        if self.trainer.steps_per_collection > 1 and self.loss.pi_old != "engine":
            raise ValueError(
                f"trainer.steps_per_collection = {self.trainer.steps_per_collection} needs loss.pi_old = engine: "
                f"{self.loss.pi_old} keeps the weights of a version, not of each step within it"
            )
        return self

    @model_validator(mode="after")
    def _one_gpu_where_weights_are_mapped(self) -> RunConfig:
        if self.rollout.publish.way != "ipc":
            return self
        engine, ranks = self.rollout.engine, self.trainer.parallel.world_size
        if engine.kind != "sglang":
            raise ValueError(
                f"rollout.publish.way = ipc needs rollout.engine.kind = sglang, not {engine.kind}: no other policy server "
                "that the run starts maps the trainer's memory; use broadcast or disk"
            )
        if ranks * engine.num_engines * engine.tp != 1:
            raise ValueError(
                f"rollout.publish.way = ipc needs one trainer rank and one engine of tp 1 on the same GPU, not {ranks} ranks "
                f"and {engine.num_engines} engine(s) of tp {engine.tp}; use broadcast"
            )
        return self
