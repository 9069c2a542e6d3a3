"""KL to a reference policy from one sample a token: the three usual estimators.

With d = log pi - log pi_ref at a token sampled from pi: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d.
As a loss term, differentiated through log pi: k1 has a gradient of mean zero (it only adds noise), k2 has the
gradient of KL(pi || pi_ref), k3 has that of KL(pi_ref || pi).
Source: J. Schulman, "Approximating KL divergence" (2020); GRPO, arXiv:2402.03300 eq. 4 uses k3.
"""

from __future__ import annotations

from typing import Literal

import torch

KlName = Literal["k1", "k2", "k3"]
KlChoice = KlName | tuple[KlName, float] | None


def kl_term(name: str, difference: torch.Tensor) -> torch.Tensor:
    """The estimator `name` of each token's log pi - log pi_ref."""
    if name == "k1":
        return difference
    if name == "k2":
        return 0.5 * difference.square()
    if name == "k3":
        return (-difference).exp() - 1 + difference
    raise ValueError(f'kl {name!r} must be "k1", "k2" or "k3"')


def old_to_new_k3(delta: torch.Tensor) -> torch.Tensor:
    """k3 of KL(old || new) from delta = log new - log old at tokens of the old policy; a statistic, without gradient."""
    bounded = delta.detach().clamp(-80.0, 80.0)
    return bounded.exp() - 1 - bounded


def split_kl(kl: KlChoice, ref_logp: torch.Tensor | None, logp: torch.Tensor) -> tuple[KlName | None, float]:
    """(name, coefficient); a bare name has coefficient 1. ValueError if the reference is missing or has another shape."""
    if kl is None:
        return None, 0.0
    name, coefficient = (kl, 1.0) if isinstance(kl, str) else (kl[0], float(kl[1]))
    if name not in ("k1", "k2", "k3"):
        raise ValueError(f'kl {name!r} must be "k1", "k2" or "k3", or a pair of that and a coefficient')
    if ref_logp is None:
        raise ValueError("kl is on, so ref_logp [T], the reference policy's log-probs, must be given")
    if ref_logp.shape != logp.shape or ref_logp.dtype != logp.dtype:
        raise ValueError(
            f"ref_logp {ref_logp.dtype} {tuple(ref_logp.shape)} must be like logp {logp.dtype} {tuple(logp.shape)}"
        )
    return name, coefficient
