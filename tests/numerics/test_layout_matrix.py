"""Head and loss together: 40 ragged segments through every layout of four processes give one loss and one gradient.

Every combination of DP 1, 2, 4, TP 1, 2 and CP 1, 2, of 1 and 3 micro-batches a rank, of two packing orders, with and without
an empty data-parallel rank. Four gloo processes are TP x CP x DP as far as they reach; data-parallel ranks beyond run one after
the other on the same process, which is the same sum. The model is a linear layer before the language-model head.
"""

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from slime_cua.algo.losses import LOSSES, LossInputs
from slime_cua.config.algo import LossConfig
from slime_cua.kernels.linear_logprob import linear_logprob
from tests.numerics.gspo_reference import random_batch
from tests.numerics.two_ranks import run_ranks

WORLD, NUM_SEGMENTS, WIDTH, VOCAB, PADDED = 4, 40, 6, 21, 24
CONFIG = LossConfig(
    eps_low=0.05,
    eps_high=0.08,
    dual_clip=1.2,
    kl="k3",
    kl_coef=0.2,
    entropy_coef=0.05,
    step_weights={"gui": 1.0},
)
LAYOUTS = list(itertools.product((1, 2, 4), (1, 2), (1, 2), (1, 3), (1, 2), (False, True)))
"""(dp, tp, cp, micro-batches, order, has an empty rank)."""


class Problem:
    """Trained tokens of a ragged batch, features, targets and parameters; the same on every process."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self.batch = random_batch(seed=99, num_segments=NUM_SEGMENTS)
        self.tokens = [token for token in self.batch.tokens if token.is_trained]
        count = len(self.tokens)
        double = {"generator": generator, "dtype": torch.float64}
        self.features_TH = torch.randn(count, WIDTH, **double).to(dtype)
        self.layer_HH = (torch.randn(WIDTH, WIDTH, **double) / WIDTH**0.5).to(dtype)
        self.head_VH = torch.randn(PADDED, WIDTH, **double).to(dtype)
        self.target_T = torch.randint(0, VOCAB, (count,), generator=generator)
        with torch.no_grad():
            logp_T = self.plain_logp(self.layer_HH, self.head_VH)[0].double()
        noise_T = torch.tensor([token.old_logp - token.logp for token in self.tokens], dtype=torch.float64)
        self.old_T, self.ref_T = logp_T + noise_T, logp_T - noise_T / 2

    def plain_logp(self, layer, head):
        logits = (self.features_TH @ layer) @ head[:VOCAB].t()
        log_p = torch.log_softmax(logits.float() if logits.dtype == torch.bfloat16 else logits, dim=-1)
        entropy = -(log_p.exp() * log_p).sum(dim=-1)
        return log_p.gather(1, self.target_T[:, None])[:, 0], entropy

    def inputs(self, segments, rows, logp, entropy, cp_group=None) -> LossInputs:
        """One micro-batch of `segments`, of which `rows` (token numbers) are on this process."""
        seat = {segment: place for place, segment in enumerate(segments)}
        steps = sorted({token.step for token in self.tokens if token.segment in seat})
        place = {step: k for k, step in enumerate(steps)}

        def pick(values):
            return torch.tensor(values, dtype=torch.float64).to(logp.dtype)

        return LossInputs(
            logp_T=logp,
            old_logp_T=self.old_T[rows].to(logp.dtype),
            ref_logp_T=self.ref_T[rows].to(logp.dtype),
            entropy_T=entropy,
            mask_T=torch.ones(len(rows), dtype=torch.bool),
            segment_id_T=torch.tensor([seat[self.tokens[i].segment] for i in rows], dtype=torch.long),
            step_id_T=torch.tensor([place[self.tokens[i].step] for i in rows], dtype=torch.long),
            advantage_S=pick([self.batch.advantage[s] for s in segments]),
            sample_weight_S=pick([self.batch.sample_weight[s] for s in segments]),
            step_weight_K=pick([self.batch.step_weight[k] for k in steps]),
            num_samples=sum(self.batch.sample_weight),
            num_tokens=float(len(self.tokens)),
            cp_group=cp_group,
        )


def reference(problem: Problem) -> torch.Tensor:
    """(loss, gradient of the layer, gradient of the head) flat, by plain torch on one process."""
    layer, head = problem.layer_HH.clone().requires_grad_(), problem.head_VH.clone().requires_grad_()
    logp, entropy = problem.plain_logp(layer, head)
    rows = list(range(len(problem.tokens)))
    loss, _ = LOSSES["gspo"](problem.inputs(list(range(NUM_SEGMENTS)), rows, logp, entropy), CONFIG)
    loss.backward()
    return torch.cat([loss.detach()[None], layer.grad.flatten(), head.grad.flatten()]).double()


def cut(layout) -> list[list[list[int]]]:
    """[data-parallel rank][micro-batch] -> segments."""
    dp, _, _, num_micro, order, has_empty = layout
    shuffled = random.Random(order).sample(range(NUM_SEGMENTS), NUM_SEGMENTS)
    ranks = dp - 1 if has_empty and dp > 1 else dp
    inner = sorted(random.Random(order + 7).sample(range(1, NUM_SEGMENTS), ranks * num_micro - 1))
    parts = [shuffled[a:b] for a, b in itertools.pairwise([0, *inner, NUM_SEGMENTS])]
    parts += [[] for _ in range((dp - ranks) * num_micro)]
    return [parts[d * num_micro : (d + 1) * num_micro] for d in range(dp)]


def run_layout(problem: Problem, layout, groups) -> torch.Tensor:
    """As `reference`, summed over all processes."""
    dp, tp, cp, _, order, _ = layout
    rank = dist.get_rank()
    tp_rank, cp_rank, replica = rank % tp, rank // tp % cp, rank // (tp * cp)
    num_replicas = min(dp, WORLD // (tp * cp))
    layer, head = problem.layer_HH.clone().requires_grad_(), problem.head_VH.clone().requires_grad_()
    loss_sum = 0.0
    for number, share in enumerate(cut(layout)):
        if number % num_replicas != replica:
            continue
        for segments in share:
            rows = [i for i, token in enumerate(problem.tokens) if token.segment in segments]
            random.Random(order).shuffle(rows)
            if cp == 2:
                half = (
                    len(rows) // 2 if len(segments) % 3 else len(rows)
                )  # some micro-batches leave a rank empty
                rows = rows[:half] if cp_rank == 0 else rows[half:]
            logp, entropy = linear_logprob(
                problem.features_TH[rows] @ layer,
                head.chunk(tp)[tp_rank],
                problem.target_T[rows],
                vocab_size=VOCAB,
                tp_group=groups["tp"] if tp == 2 else None,
                entropy_grad=True,
            )
            cp_group = groups["cp", tp] if cp == 2 else None
            loss, _ = LOSSES["gspo"](problem.inputs(segments, rows, logp, entropy, cp_group), CONFIG)
            loss.backward()
            loss_sum += loss.item()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in (layer, head)]
    is_first = float(tp_rank == 0)  # the layer is replicated over TP, its gradient whole on each of them
    total = torch.cat(
        [
            torch.tensor([loss_sum * is_first * (cp_rank == 0)], dtype=torch.float64),
            grads[0].flatten().double() * is_first,
            grads[1].flatten().double(),
        ]
    )
    dist.all_reduce(total)
    return total


def on_four_ranks(group):
    def mine(*members):
        made = [dist.new_group(list(ranks)) for ranks in members]
        return next(g for g, ranks in zip(made, members, strict=True) if dist.get_rank() in ranks)

    groups = {"tp": mine((0, 1), (2, 3)), ("cp", 1): mine((0, 1), (2, 3)), ("cp", 2): mine((0, 2), (1, 3))}
    double, low = Problem(torch.float64), Problem(torch.bfloat16)
    return {
        "float64": {layout: run_layout(double, layout, groups) for layout in LAYOUTS},
        "bf16": {layout: run_layout(low, layout, groups) for layout in LAYOUTS if layout[4] == 1},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(
        "tests.numerics.test_layout_matrix", "on_four_ranks", tmp_path_factory.mktemp("matrix"), WORLD
    )[0]


def test_every_layout_gives_the_loss_and_gradient_of_plain_torch_in_float64(found):
    want = reference(Problem(torch.float64))
    assert len(found["float64"]) == 96
    for layout, total in found["float64"].items():
        error = (total - want).abs().max().item()
        assert error < 1e-12, f"{layout}: {error}"


def test_in_bf16_layouts_differ_by_the_rounding_of_the_stored_gradients_only(found):
    """bf16 parameters and hidden states: the loss to 1e-6; the gradient, rounded to bf16 at each micro-batch, to 1e-2."""
    want = found["bf16"][1, 1, 1, 1, 1, False]
    exact = reference(Problem(torch.bfloat16))
    assert (want[0] - exact[0]).abs() < 1e-2
    for layout, total in found["bf16"].items():
        assert (total[0] - want[0]).abs() < 1e-6, layout
        assert (total - want)[1:].norm() < 1e-2 * want[1:].norm(), layout
