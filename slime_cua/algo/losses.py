"""Policy losses by name over one bundle of inputs. Pure functions; no framework.

Legend: T trained rows (or packed tokens with a mask), K action steps, S segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slime_cua.algo.gspo import (
    Stats,
    check_count,
    check_samples,
    check_shapes,
    clipped_objective,
    gspo_loss,
    type_statistics,
)
from slime_cua.algo.kl import KlChoice, kl_term, old_to_new_k3, split_kl
from slime_cua.algo.reduce import Group, StepMap, build_step_map, finite_total, keep, sum_over
from slime_cua.config.algo import LossConfig
from slime_cua.kernels.segment_ratio import RATIO_BOUND


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one micro-batch. Counts are global: over all ranks and micro-batches of the optimiser step."""

    logp_T: torch.Tensor
    old_logp_T: torch.Tensor
    mask_T: torch.Tensor
    segment_id_T: torch.Tensor
    step_id_T: torch.Tensor
    advantage_S: torch.Tensor
    num_samples: float
    """Sum of sample weights over the optimiser step."""
    num_tokens: float
    """Trained tokens over the optimiser step; the denominator of token means."""
    sample_weight_S: torch.Tensor | None = None
    step_weight_K: torch.Tensor | None = None
    step_type_K: torch.Tensor | None = None
    num_types: int | None = None
    ref_logp_T: torch.Tensor | None = None
    entropy_T: torch.Tensor | None = None
    token_weight_T: torch.Tensor | None = None
    """Importance correction a token (constant); token-level losses only. Segment-level ones go into sample_weight_S."""
    pi_old: str = "engine"
    """Whose log-probs old_logp_T are; with_old_policy sets it. A loss refuses inputs of another choice than its config's."""
    is_off_policy_masked: bool = False
    """off_policy_max_gap was applied to sample_weight_S."""
    cp_group: Group = None


Loss = Callable[[LossInputs, LossConfig], tuple[torch.Tensor, Stats]]


def gspo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Stats]:
    """Sequence-level GSPO, step-balanced or standard: see gspo_loss. Adds the entropy bonus with the same weights.

    Raises ValueError if token_weight_T is given: the correction of a sequence-level loss is one number a segment.
    """
    if inputs.token_weight_T is not None:
        raise ValueError(
            "gspo has one ratio a segment: put the correction into sample_weight_S, not token_weight_T"
        )
    _check_applied(inputs, config)
    loss, stats = gspo_loss(
        inputs.logp_T,
        inputs.old_logp_T,
        inputs.mask_T,
        inputs.segment_id_T,
        inputs.step_id_T,
        inputs.advantage_S,
        aggregate=config.aggregate,
        step_weight=inputs.step_weight_K,
        eps_low=config.eps_low,
        eps_high=config.eps_high,
        dual_clip=config.dual_clip,
        sample_weight=inputs.sample_weight_S,
        num_samples=inputs.num_samples,
        kl=_kl(config),
        ref_logp=inputs.ref_logp_T,
        step_type=inputs.step_type_K,
        num_types=inputs.num_types,
        cp_group=inputs.cp_group,
    )
    if config.entropy_coef:
        frame = _frame(inputs, config)
        assert inputs.entropy_T is not None
        loss = loss - config.entropy_coef * frame.sample_mean(keep(frame.steps.is_kept_T, inputs.entropy_T))
    return loss, stats


def grpo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Stats]:
    """Token-level clipped objective, mean over each sample's tokens, mean over samples.

        r_t = exp(logp_t - old_logp_t);  J_t = min(A r_t, A clip(r_t));  dual clip as in gspo_loss
        loss = -(1/B) sum_i weight_i sum_k c_k mean_{t in a_k} (token_weight_t J_t - kl_coef KL_t + entropy_coef H_t)
    c_k = |a_k| / sum |a_k| for aggregate="token" (GRPO), 1/K for "step" (step-balanced), with alpha factors.
    Source: DeepSeekMath, arXiv:2402.03300 eq. 3.
    """
    _check_applied(inputs, config)
    frame = _frame(inputs, config)
    value_T, stats = _clipped_tokens(frame, inputs, config)
    return 0.0 - frame.sample_mean(value_T), stats


def dapo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Stats]:
    """grpo with every trained token of the optimiser step weighing the same (aggregate="token"): 1 / num_tokens each.

    aggregate="step" gives grpo's step-balanced mean. Source: DAPO, arXiv:2503.14476 eq. 8 (and its asymmetric clip).
    """
    _check_applied(inputs, config)
    frame = _frame(inputs, config)
    value_T, stats = _clipped_tokens(frame, inputs, config)
    return 0.0 - frame.mean(value_T), stats


def cispo(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Stats]:
    """Clipped importance weight as a constant times the policy gradient: no token loses its gradient.

        loss = -(1/num_tokens) sum_t weight_i constant(clip(r_t, 1 - eps_low, 1 + eps_high)) A_i logp_t    (aggregate="token")
    eps_low >= 1 means no lower bound. Raises ValueError if dual_clip is set: the bound has no meaning here.
    Source: MiniMax-M1, arXiv:2506.13585 eq. 4.
    """
    if config.dual_clip is not None:
        raise ValueError(
            "cispo does not use dual_clip; set loss.dual_clip to null or loss.name to gspo or grpo"
        )
    _check_applied(inputs, config)
    frame = _frame(inputs, config)
    ratio_T = frame.delta_T.detach().exp()
    low, high = 1 - config.eps_low, 1 + config.eps_high
    value_T = ratio_T.clamp(min=max(low, 0.0), max=high) * frame.advantage_T * frame.logp_T
    value_T = _extras(frame, inputs, config, _weighted(frame, inputs, value_T))
    is_low_T, is_high_T = frame.steps.is_kept_T & (ratio_T < low), frame.steps.is_kept_T & (ratio_T > high)
    return 0.0 - frame.mean(value_T), _token_statistics(frame, inputs, {"low": is_low_T, "high": is_high_T})


def sft(inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Stats]:
    """Negative log-likelihood of trained tokens: mean over tokens (aggregate="token") or step-balanced over samples.

    Advantages and old log-probs are not used. stats: num_samples, num_tokens, nll_sum.
    """
    frame = _frame(inputs, config)
    stats = {
        "num_samples": frame.steps.is_present_S.sum().to(frame.logp_T.dtype),
        "num_tokens": frame.steps.count_K.sum(),
        "nll_sum": sum_over(0.0 - frame.logp_T.detach().sum(), inputs.cp_group),
    }
    return 0.0 - frame.mean(frame.logp_T), stats


LOSSES: dict[str, Loss] = {"gspo": gspo, "grpo": grpo, "dapo": dapo, "cispo": cispo, "sft": sft}


@dataclass(frozen=True)
class _Frame:
    """Masked tokens of a batch and its two means."""

    steps: StepMap
    logp_T: torch.Tensor
    delta_T: torch.Tensor
    advantage_T: torch.Tensor
    weight_S: torch.Tensor
    inputs: LossInputs
    aggregate: str

    def sample_mean(self, value_T: torch.Tensor) -> torch.Tensor:
        """(1/B) sum_i weight_i sum_k c_k mean_{t in a_k} value_t."""
        mean_S = self.steps.segment_means(self.steps.step_means(value_T[:, None])[:, 0])
        total = finite_total(keep(self.steps.is_present_S, self.weight_S * mean_S).sum())
        return total / max(float(self.inputs.num_samples), 1e-30)

    def mean(self, value_T: torch.Tensor) -> torch.Tensor:
        """Over the tokens of the optimiser step for "token", else sample_mean."""
        if self.aggregate == "step":
            return self.sample_mean(value_T)
        if self.steps.num_segments == 0:
            return value_T.sum()
        weight_T = keep(self.steps.is_kept_T, self.weight_S[self.steps.segment_of_token()])
        total = finite_total(sum_over((weight_T * value_T).sum(), self.steps.cp_group))
        check_count("num_tokens", float(self.inputs.num_tokens), self.steps)
        return total / max(float(self.inputs.num_tokens), 1e-30)


def step_map(
    inputs: LossInputs, config: LossConfig, correction_T: torch.Tensor | None = None
) -> tuple[StepMap, torch.Tensor]:
    """(StepMap, sample weights [S]) of `inputs`, with the checks of shapes, log-probs, ids, weights and counts.

    correction_T: a further tensor that must be finite where trained.
    """
    check_shapes(
        inputs.logp_T,
        inputs.old_logp_T,
        inputs.mask_T,
        inputs.segment_id_T,
        inputs.step_id_T,
        inputs.advantage_S,
        inputs.step_weight_K,
        inputs.sample_weight_S,
        inputs.step_type_K,
        inputs.num_types,
    )
    advantage_S = inputs.advantage_S
    dtype = torch.float64 if inputs.logp_T.dtype == torch.float64 else torch.float32
    weight_S = inputs.sample_weight_S
    weight_S = torch.ones_like(advantage_S, dtype=dtype) if weight_S is None else weight_S.to(dtype)
    known = inputs.step_weight_K if inputs.step_weight_K is not None else inputs.step_type_K
    steps = build_step_map(
        inputs.mask_T,
        inputs.segment_id_T,
        inputs.step_id_T,
        is_active_S=weight_S != 0,
        step_weight=inputs.step_weight_K,
        num_steps=None if known is None else known.shape[0],
        aggregate=config.aggregate,
        dtype=dtype,
        finite=(inputs.logp_T, inputs.old_logp_T, *_used(inputs, config, correction_T)),
        cp_group=inputs.cp_group,
    )
    check_samples(advantage_S, weight_S, steps, inputs.num_samples)
    return steps, weight_S


def _used(inputs: LossInputs, config: LossConfig, correction_T: torch.Tensor | None) -> list[torch.Tensor]:
    """The optional tensors that enter the loss. ValueError for one that is not [T]."""
    optional = {
        "ref_logp_T": inputs.ref_logp_T if config.kl is not None else None,
        "entropy_T": inputs.entropy_T if config.entropy_coef else None,
        "token_weight_T": inputs.token_weight_T,
        "start_logp_T - old_logp_T": correction_T,
    }
    used = {name: value for name, value in optional.items() if value is not None}
    for name, value in used.items():
        if value.shape != inputs.logp_T.shape:
            raise ValueError(f"{name} {tuple(value.shape)} must be [T] = {tuple(inputs.logp_T.shape)}")
    return list(used.values())


def _frame(inputs: LossInputs, config: LossConfig) -> _Frame:
    if config.entropy_coef and inputs.entropy_T is None:
        raise ValueError("entropy_coef is set, so entropy_T [T] must be given, with its gradient")
    steps, weight_S = step_map(inputs, config)
    kept_T, dtype = steps.is_kept_T, weight_S.dtype
    clean_S = keep(steps.is_present_S, inputs.advantage_S.to(dtype))
    advantage_T = clean_S[steps.segment_of_token()] if steps.num_segments else kept_T.to(dtype)
    logp_T, old_T = keep(kept_T, inputs.logp_T).to(dtype), keep(kept_T, inputs.old_logp_T).to(dtype)
    return _Frame(
        steps, logp_T, logp_T - old_T, keep(kept_T, advantage_T), weight_S, inputs, config.aggregate
    )


def _check_applied(inputs: LossInputs, config: LossConfig) -> None:
    """ValueError if the config asks for an old policy or a masking that the inputs do not have."""
    if inputs.pi_old != config.pi_old:
        raise ValueError(
            f"loss.pi_old is {config.pi_old}, the inputs have {inputs.pi_old}: pass them through with_old_policy, or set loss.pi_old = {inputs.pi_old}"
        )
    if config.off_policy_max_gap is not None and not inputs.is_off_policy_masked:
        raise ValueError(
            "loss.off_policy_max_gap is set: pass the inputs through with_old_policy, or set it to null"
        )


def _kl(config: LossConfig) -> KlChoice:
    return None if config.kl is None else (config.kl, config.kl_coef)


def _weighted(frame: _Frame, inputs: LossInputs, value_T: torch.Tensor) -> torch.Tensor:
    if inputs.token_weight_T is None:
        return value_T
    return keep(frame.steps.is_kept_T, inputs.token_weight_T.detach()).to(value_T.dtype) * value_T


def _extras(frame: _Frame, inputs: LossInputs, config: LossConfig, value_T: torch.Tensor) -> torch.Tensor:
    """value_T - kl_coef KL_t + entropy_coef H_t."""
    name, coefficient = split_kl(_kl(config), inputs.ref_logp_T, inputs.logp_T)
    if name is not None and inputs.ref_logp_T is not None:
        ref_T = keep(frame.steps.is_kept_T, inputs.ref_logp_T).to(frame.logp_T.dtype)
        value_T = value_T - coefficient * kl_term(name, frame.logp_T - ref_T)
    if config.entropy_coef and inputs.entropy_T is not None:
        value_T = value_T + config.entropy_coef * keep(frame.steps.is_kept_T, inputs.entropy_T)
    return value_T


def _clipped_tokens(frame: _Frame, inputs: LossInputs, config: LossConfig) -> tuple[torch.Tensor, Stats]:
    value_T, branch_T = clipped_objective(
        frame.delta_T, frame.advantage_T, config.eps_low, config.eps_high, config.dual_clip, inputs.cp_group
    )
    value_T = _extras(frame, inputs, config, _weighted(frame, inputs, value_T))
    return value_T, _token_statistics(frame, inputs, branch_T)


def _token_statistics(frame: _Frame, inputs: LossInputs, branch_T: dict[str, torch.Tensor]) -> Stats:
    """Like gspo_loss' statistics; ratios are of tokens, which `num_ratios` and `clipped*` count.

    `clipped_steps_by_type` sums each step's clipped share.
    """
    dtype = frame.logp_T.dtype
    steps, delta_T = frame.steps, frame.delta_T.detach()
    flags = {name: flag.to(dtype) for name, flag in branch_T.items()}
    clipped_T = torch.stack(list(flags.values())).sum(dim=0)
    means_KN = steps.step_means(torch.stack([delta_T, old_to_new_k3(delta_T), clipped_T], dim=1))
    ratio_T = keep(steps.is_kept_T, delta_T.clamp(max=RATIO_BOUND).exp())
    local = torch.stack(
        [ratio_T.sum(), delta_T.sum(), delta_T.square().sum(), clipped_T.sum()]
        + [flags[name].sum() for name in flags]
    )
    totals = sum_over(local, inputs.cp_group)
    names = ["ratio_sum", "log_ratio_sum", "log_ratio_sq_sum", "clipped"]
    names += ["dual_clipped" if name == "dual" else f"clipped_{name}" for name in flags]
    stats = dict(zip(names, totals.unbind(), strict=True))
    stats["num_samples"] = steps.is_present_S.sum().to(dtype)
    stats["num_steps"] = steps.is_present_K.sum().to(dtype)
    stats["num_tokens"] = stats["num_ratios"] = steps.count_K.sum()
    stats["behaviour_kl_sum"] = steps.segment_means(means_KN[:, 1]).sum()
    if inputs.step_type_K is not None:
        none_S = torch.zeros_like(steps.is_present_S)
        stats |= type_statistics(steps, none_S, means_KN, inputs.step_type_K, inputs.num_types)
        type_K = torch.where(steps.is_present_K, inputs.step_type_K, 0).long()
        clipped_Y = torch.zeros_like(stats["steps_by_type"]).index_add(0, type_K, means_KN[:, 2])
        stats["clipped_steps_by_type"] = clipped_Y
    return stats
