"""Mean log-ratios of steps and segments with their gradient, fused; sums in float64 whatever the inputs are.

Legend: T packed tokens (or trained rows), K action steps, S segments.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch

from slime_cua.algo.reduce import StepMap, add_by_index, keep, sum_over

RATIO_BOUND = 80.0
"""Log-ratios are cut here for the k3 statistic, so that it stays finite."""


def segment_log_ratio(
    logp_T: torch.Tensor, old_logp_T: torch.Tensor, steps: StepMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log_w_S, mean_K2) of logp_T - old_logp_T over the trained tokens, in the dtype of logp_T.

        dbar_k  = (1/|a_k|) sum_{t in a_k} (logp_t - old_logp_t);     mean_K2[:, 0]
        k3bar_k = the same mean of exp(delta) - 1 - delta;            mean_K2[:, 1], a statistic
        log w_i = sum_k coefficient_k dbar_k
        d log w_i / d logp_t = coefficient_k / |a_k| for t in a_k of segment i, exactly 0 where not trained

    logp_T, old_logp_T: [T], one float dtype, anything where not trained. old_logp_T is a constant. Sums and counts of a step are
    reduced over steps.cp_group first; every rank then holds the same result and the gradient of its own tokens.
    Deterministic: no floating-point atomics on the device; float64 sums, so that the order of tokens hardly matters.
    Source: OS-Helix, appendix E; GSPO, arXiv:2507.18071 eq. 5.
    """
    kernel = _triton_kernel() if _fits(logp_T, steps) else None
    if kernel is not None:
        result: tuple[torch.Tensor, torch.Tensor] = kernel.triton_segment_log_ratio(logp_T, old_logp_T, steps)
        return result
    return torch_segment_log_ratio(logp_T, old_logp_T, steps)


def torch_segment_log_ratio(
    logp_T: torch.Tensor, old_logp_T: torch.Tensor, steps: StepMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """segment_log_ratio in plain torch, on any device."""
    delta_T = keep(steps.is_kept_T, logp_T).double() - keep(steps.is_kept_T, old_logp_T.detach()).double()
    bounded_T = delta_T.detach().clamp(-RATIO_BOUND, RATIO_BOUND)
    columns_T2 = torch.stack([delta_T, bounded_T.exp() - 1 - bounded_T], dim=1)
    sums_K2 = sum_over(add_by_index(columns_T2, steps.step_T, steps.num_steps), steps.cp_group)
    means_K2 = sums_K2 / steps.count_K.double().clamp(min=1.0)[:, None]
    shares_K = steps.coefficient_K.double() * means_K2[:, 0]
    log_w_S = add_by_index(shares_K, steps.segment_K, steps.num_segments)
    return log_w_S.to(logp_T.dtype), means_K2.detach().to(logp_T.dtype)


def _fits(logp_T: torch.Tensor, steps: StepMap) -> bool:
    return logp_T.is_cuda and min(logp_T.shape[0], steps.num_steps, steps.num_segments) > 0


@cache
def _triton_kernel() -> ModuleType | None:
    """The Triton implementation, or None where Triton is not installed."""
    try:
        return importlib.import_module("slime_cua.kernels.triton_segments")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
