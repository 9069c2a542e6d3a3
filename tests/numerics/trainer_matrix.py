"""Run the trainer under several layouts in one start of two (or four) processes, and save what it computed.

python -m tests.numerics.trainer_matrix OUT.pt LAYOUT,LAYOUT MODEL_DIR MODEL_DIR   (tests call run_layouts)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import megatron_patches
from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.ports import free_port
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.trainer_cases import samples_for
from tests.numerics.warm_ranks import run_together

NUM_STEPS = 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel": ParallelConfig(tp=1, dp=2), "use_distributed_optimizer": False},
    "dp2_distopt": {"parallel": ParallelConfig(tp=1, dp=2)},
    "tp2": {"parallel": ParallelConfig(tp=2)},
    "tp2_sp": {"parallel": ParallelConfig(tp=2, sequence_parallel=True)},
    "dp2_ep2": {"parallel": ParallelConfig(tp=1, dp=2, ep=2)},
    "tp2_sp_ep2": {"parallel": ParallelConfig(tp=2, ep=2, sequence_parallel=True)},
    "cp2": {"parallel": ParallelConfig(cp=2), "use_distributed_optimizer": False, "max_tokens_per_rank": 112},
    "cp2_distopt": {"parallel": ParallelConfig(cp=2), "max_tokens_per_rank": 112},
    "cp2_tp2_sp": {
        "parallel": ParallelConfig(cp=2, tp=2, sequence_parallel=True),
        "use_distributed_optimizer": False,
        "max_tokens_per_rank": 112,
        "recompute": "full",
    },
    "cp2_dp2": {"parallel": ParallelConfig(cp=2, dp=2), "max_tokens_per_rank": 112},
    "tp2_recompute": {"parallel": ParallelConfig(tp=2), "recompute": "full", "max_tokens_per_rank": 512},
}


SAVED_AT, RESUMED_AT = ("tp2", "tp2_sp_ep2", "cp2_distopt"), ("dp2_distopt", "dp2_ep2")
WITHOUT_WHOLE_GRADIENTS = ("dp2_distopt", "dp2_ep2", "cp2_distopt", "cp2_dp2")
"""The distributed optimiser keeps each rank's shard only."""


def config_of(layout: str) -> TrainerConfig:
    """Small micro-batches, so that every rank has several; one for all where the layout says so."""
    common: dict[str, Any] = {
        "dtype": "fp32",
        "max_tokens_per_rank": 208,
        "freeze_vision": False,
        "optimizer": OptimizerConfig(lr=1e-3, weight_decay=0.01),
    }
    return TrainerConfig(**{**common, **LAYOUTS[layout]})


def gradients(trainer: TrainerRank, samples: Any, store: Any, is_completed: bool = True) -> dict[str, Any]:
    """Whole gradients of the supervised loss by Hugging Face name, and Megatron's norm of them.

    The bridge exports what is in the parameters, so main_grad is put there for the export.
    is_completed: False leaves out megatron_patches.before_finalize.
    """
    from megatron.core.distributed import finalize_model_grads

    model, optimizer = trainer.model, trainer.optimizer
    num_tokens = sum(sum(s.segment.is_trained) for s in samples)
    with megatron_patches.cpu_scope():
        optimizer.zero_grad()
        for _, batch in trainer._microbatches(trainer._pack(samples), store):
            (-model.logprobs(batch, 1.0)[0].sum() / num_tokens).backward()
        if is_completed:
            optimizer.reduce_gradients()
        else:
            finalize_model_grads([optimizer.ddp], None)
        optimizer.megatron.prepare_grads()
        norm = float(optimizer.megatron.get_grad_norm())
        weights = {name: p.data for name, p in model.module.named_parameters()}
        for p in model.module.parameters():
            p.data = p.main_grad.to(p.dtype).clone()
        grads = {name: tensor.clone() for name, tensor in model.export()}
        for name, p in model.module.named_parameters():
            p.data = weights[name]
    return {"grads": grads, "norm": norm}


def symptoms(trainer: TrainerRank, samples: Any, store: Any) -> dict[str, Any]:
    """What each gradient patch mends, seen by undoing it."""
    module, found = trainer.model.module, {}
    tower = module.visual.visual
    if getattr(tower.config, "deepstack_visual_indexes", None):
        hooks = dict(tower._forward_hooks)
        tower._forward_hooks.clear()
        found["without_deepstack_sum"] = gradients(trainer, samples, store)
        tower._forward_hooks.update(hooks)
        return found
    found["without_output_norm"] = gradients(trainer, samples, store, is_completed=False)
    norms = [
        p for n, p in module.named_parameters() if n.endswith("self_attention.in_proj.layer_norm_weight")
    ]
    for p in norms:
        p.sequence_parallel = True
    found["with_input_norm_flag"] = gradients(trainer, samples, store)
    for p in norms:
        p.sequence_parallel = False
    return found


def run_layout(trainer: TrainerRank, folder: Path, layout: str, scratch: Path) -> dict[str, Any]:
    """Everything the tests look at, for one model under one layout."""
    samples, store = samples_for(folder)
    trainer.load(folder)
    out: dict[str, Any] = {"logp": trainer.logprobs(samples, store)}
    out["export"] = {name: tensor.clone() for name, tensor in trainer.named_hf_tensors("source")}
    if layout not in WITHOUT_WHOLE_GRADIENTS:
        out.update(gradients(trainer, samples, store))
    has_symptoms = any("linear_attn" in name or "deepstack" in name for name in out["export"])
    if has_symptoms and layout in ("tp2", "tp2_sp"):
        out.update(symptoms(trainer, samples, store))
    out["empty"] = trainer.train_step([], store, "gspo")
    out["one_sample"] = trainer.train_step(samples[:1], store, "gspo")["loss/policy"]
    trainer.load(folder)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        if layout in SAVED_AT and step == 2:
            trainer.save(scratch / f"saved_{folder.name}", step)
        metrics = trainer.train_step(samples, store, "sft")
        losses.append(metrics["sft/loss"])
        norms.append(metrics["sft/grad_norm"])
    out["losses"], out["norms"] = losses, norms
    out["gspo"] = trainer.train_step(samples, store, "gspo", temperature=0.5)
    out["trained"] = {name: tensor.clone() for name, tensor in trainer.named_hf_tensors()}
    return out


def resume(trainer: TrainerRank, folder: Path, scratch: Path) -> dict[str, Any]:
    """Losses of a run continued from what another layout saved after two steps."""
    samples, store = samples_for(folder)
    trainer.load(folder)
    step = trainer.restore(scratch / f"saved_{folder.name}")
    losses = [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(NUM_STEPS - step)]
    target = scratch / f"export_{folder.name}"
    trainer.load(folder)
    trainer.export_hf(target)
    return {"step": step, "losses": losses}


def serve(rank: int, ports: dict[str, int], out: Path, folders: list[Path]) -> None:
    """One of the processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    results: dict[str, Any] = {}
    for layout, port in ports.items():
        config = config_of(layout)
        trainer = TrainerRank(config, rank, config.parallel.world_size, "127.0.0.1", port)
        for folder in folders:
            results[f"{layout}/{folder.name}"] = run_layout(trainer, folder, layout, out.parent)
            if layout in RESUMED_AT:
                results[f"resumed/{folder.name}"] = resume(trainer, folder, out.parent)
        trainer.close()
    if rank == 0:
        torch.save(results, out)


def run_layouts(out: Path, layouts: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """What two processes (as many as the layouts have ranks) computed, by layout/model."""
    ports = {layout: free_port() for layout in layouts}
    (world,) = {config_of(layout).parallel.world_size for layout in layouts}
    run_together(serve, [(rank, ports, out, list(folders)) for rank in range(world)], timeout_s=1700)
    loaded: dict[str, Any] = torch.load(out, weights_only=False)
    return loaded


if __name__ == "__main__":
    run_layouts(Path(sys.argv[1]), sys.argv[2].split(","), [Path(name) for name in sys.argv[3:]])
