"""The losses again, as slow loops over Python floats written from docs/algorithm.md; and random ragged batches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import torch


@dataclass
class Token:
    segment: int
    step: int
    is_trained: bool
    logp: float
    old_logp: float
    ref_logp: float
    entropy: float
    token_weight: float


@dataclass
class Batch:
    tokens: list[Token]
    advantage: list[float]
    sample_weight: list[float]
    step_weight: list[float]
    step_type: list[int]
    num_types: int = 3
    options: dict = field(default_factory=dict)

    def tensor(self, name: str) -> torch.Tensor:
        values = [getattr(token, name) for token in self.tokens]
        kind = {"is_trained": torch.bool, "segment": torch.long, "step": torch.long}.get(name, torch.float64)
        return torch.tensor(values, dtype=kind)

    def vector(self, name: str) -> torch.Tensor:
        kind = torch.long if name == "step_type" else torch.float64
        return torch.tensor(getattr(self, name), dtype=kind)


def random_batch(seed: int, num_segments: int = 40, noise: float = 0.4) -> Batch:
    """Ragged segments of 1 to 4 steps of 1 to 9 trained tokens among masked garbage, tokens shuffled."""
    rng = random.Random(seed)
    tokens, step_weight, step_type = [], [], []
    for segment in range(num_segments):
        for position in range(rng.randint(1, 4)):
            step = len(step_weight)
            step_weight.append(rng.choice([0.5, 1.0, 2.0]) if position == 0 else rng.choice([0.0, 1.0, 1.5]))
            step_type.append(rng.randrange(3))
            for _ in range(rng.randint(1, 9)):
                old = -rng.random() * 3
                tokens.append(
                    Token(
                        segment,
                        step,
                        True,
                        old + rng.gauss(0, noise),
                        old,
                        old + rng.gauss(0, 0.3),
                        rng.random(),
                        rng.uniform(0.2, 2.0),
                    )
                )
        for _ in range(rng.randint(0, 3)):
            bad = rng.choice([math.nan, math.inf, -math.inf])
            tokens.append(Token(rng.choice([segment, -1, 999]), -1, False, bad, -bad, bad, bad, bad))
    rng.shuffle(tokens)
    advantage = [rng.choice([-1.3, -0.4, 0.0, 0.7, 1.1]) for _ in range(num_segments)]
    weights = [rng.choice([0.25, 0.5, 1.0]) for _ in range(num_segments)]
    return Batch(tokens, advantage, weights, step_weight, step_type)


def steps_of(batch: Batch) -> dict[int, dict[int, list[Token]]]:
    """{segment: {step: trained tokens}}."""
    found: dict[int, dict[int, list[Token]]] = {}
    for token in batch.tokens:
        if token.is_trained:
            found.setdefault(token.segment, {}).setdefault(token.step, []).append(token)
    return found


def sample_mean(batch: Batch, segment_steps: dict[int, list[Token]], value, aggregate: str) -> float:
    """sum_k alpha_k mean_k / sum alpha, alpha times |a_k| for "token"."""
    top = bottom = 0.0
    for step, tokens in segment_steps.items():
        alpha = batch.step_weight[step] * (len(tokens) if aggregate == "token" else 1)
        top += alpha * sum(value(token) for token in tokens) / len(tokens)
        bottom += alpha
    return top / bottom


def clipped(
    ratio: float, advantage: float, eps_low: float, eps_high: float, dual_clip: float | None
) -> float:
    bounded = min(max(ratio, 1 - eps_low), 1 + eps_high)
    objective = min(advantage * ratio, advantage * bounded)
    if advantage < 0 and dual_clip is not None:
        objective = max(objective, dual_clip * advantage)
    return objective


def kl_value(name: str, token: Token) -> float:
    d = token.logp - token.ref_logp
    return {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[name]


def loop_gspo(
    batch: Batch,
    *,
    aggregate,
    eps_low,
    eps_high,
    dual_clip=None,
    kl=None,
    kl_coef=0.0,
    entropy_coef=0.0,
    num_samples=None,
) -> float:
    segments = steps_of(batch)
    total = 0.0
    for segment, steps in segments.items():
        log_w = sample_mean(batch, steps, lambda token: token.logp - token.old_logp, aggregate)
        objective = clipped(math.exp(log_w), batch.advantage[segment], eps_low, eps_high, dual_clip)
        if kl is not None:
            objective -= kl_coef * sample_mean(batch, steps, lambda token: kl_value(kl, token), aggregate)
        objective += entropy_coef * sample_mean(batch, steps, lambda token: token.entropy, aggregate)
        total += batch.sample_weight[segment] * objective
    return -total / (len(segments) if num_samples is None else num_samples)


def loop_token_loss(
    batch: Batch, name: str, frozen: Batch, config, num_samples: float, num_tokens: float
) -> float:
    """grpo, dapo, cispo, sft. frozen: the batch whose ratios are constants in cispo (the undisturbed one)."""
    segments = steps_of(batch)
    frozen_ratio = {
        id(t): math.exp(f.logp - f.old_logp)
        for t, f in zip(batch.tokens, frozen.tokens, strict=True)
        if t.is_trained
    }

    def value(token: Token) -> float:
        advantage = batch.advantage[token.segment]
        if name == "sft":
            return token.logp
        if name == "cispo":
            ratio = min(max(frozen_ratio[id(token)], max(0.0, 1 - config.eps_low)), 1 + config.eps_high)
            result = token.token_weight * ratio * advantage * token.logp
        else:
            ratio = math.exp(token.logp - token.old_logp)
            result = token.token_weight * clipped(
                ratio, advantage, config.eps_low, config.eps_high, config.dual_clip
            )
        if config.kl is not None:
            result -= config.kl_coef * kl_value(config.kl, token)
        return result + config.entropy_coef * token.entropy

    total = 0.0
    for segment, steps in segments.items():
        weight = batch.sample_weight[segment]
        if config.aggregate == "token" and name != "grpo":
            total += weight * sum(value(token) for tokens in steps.values() for token in tokens) / num_tokens
        else:
            total += weight * sample_mean(batch, steps, value, config.aggregate) / num_samples
    return -total


def finite_differences(batch: Batch, loss, width: float = 1e-6) -> list[float]:
    """d loss / d logp of every token by central differences; 0 where masked."""
    gradient = []
    for token in batch.tokens:
        if not token.is_trained:
            gradient.append(0.0)
            continue
        kept = token.logp
        token.logp = kept + width
        up = loss()
        token.logp = kept - width
        down = loss()
        token.logp = kept
        gradient.append((up - down) / (2 * width))
    return gradient
