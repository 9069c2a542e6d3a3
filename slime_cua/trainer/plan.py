"""Bytes per GPU of a training layout, predicted from config.json: what a run needs before it takes any memory. No torch.

    weights     bf16 parameters of this rank
    gradients   fp32 buffer of the trained ones (Megatron's main_grad)
    optimiser   fp32 master weights and two moments: 12 bytes a trained parameter, over data-parallel ranks when distributed
    activations what a forward keeps for the backward, a layer's table times the layers; with full recompute the layers'
                inputs and one layer's table
    transient   what comes on top at the worst moment: the head, the backward of one layer, or the tower before the layers begin
    vision      patches and features, and all blocks of the tower when it is trained

The tables say what Transformer Engine, flash-linear-attention and Megatron's fused SwiGLU keep, as their code reads.

Legend: T packed tokens of a micro-batch, R trained rows, P patches, H hidden, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime_cua.config.trainer import ParallelConfig
from slime_cua.core.errors import ConfigError
from slime_cua.trainer.layouts import layout_faults
from slime_cua.trainer.sizes import ModelShape, Parameters, parameters

BF16, FP32 = 2, 4
HEAD_KEEP_BYTES, HEAD_BLOCK_BYTES = 2 << 30, 1 << 30
"""Of the fused head: at most so much of the logits is kept for the backward; fp32 logits of a block. Source: slime_cua/kernels."""
H200_BYTES = 141_000_000_000
"""HBM of an H200 by its data sheet. Source: NVIDIA H200 product brief (141 GB)."""
GDN_CHUNK = 64
"""Tokens between two states that flash-linear-attention's chunked gated delta rule writes down."""
USABLE = 0.92
"""Of it: the rest is CUDA context, NCCL buffers and fragmentation."""

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Saved:
    """A tensor that a layer keeps for its backward."""

    name: str
    width: float
    """Numbers a token, over all ranks."""
    bytes_each: int
    split: Literal["tp", "sp", "whole"]
    """tp: always over tensor-parallel ranks; sp: only with sequence_parallel; whole: on each rank."""


@dataclass(frozen=True)
class Workload:
    """One micro-batch of one rank, and how it is computed."""

    num_tokens: int
    """T."""
    trained_share: float = 0.07
    """R / T; a screenshot-heavy stream trains 5 to 10 %."""
    image_share: float = 0.75
    """Image tokens / T, repeated images counted once."""
    recompute: Recompute = "full"
    is_vision_frozen: bool = True
    is_optimizer_distributed: bool = True
    is_optimizer_offloaded: bool = False
    """The moments (two thirds of the optimiser) on the host between steps; activations are gone when they are back."""


@dataclass(frozen=True)
class Plan:
    """Predicted bytes of one rank, by owner."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    vision: int

    @property
    def total(self) -> int:
        """All of them: torch's peak of allocated memory."""
        return sum(getattr(self, name) for name in self.__dataclass_fields__)


def plan(config: Mapping[str, Any], parallel: ParallelConfig, work: Workload) -> Plan:
    """Bytes of one rank. Raises ConfigError for a layout that the model does not allow, with the reason."""
    faults = layout_faults(config, parallel)
    if faults:
        raise ConfigError(faults[0])
    shape = ModelShape.from_config(config)
    held = [(p, _on_rank(p, parallel)) for p in parameters(shape)]
    trained = [(p, count) for p, count in held if not (p.is_vision and work.is_vision_frozen)]
    optimizer = sum(12 * count / _optimizer_ranks(p, parallel, work) for p, count in trained)
    kept, working = _activations(shape, parallel, work)
    # Each rank has all patches; the tower's work on them is divided.
    patches = work.num_tokens * parallel.cp * work.image_share * shape.vision.merge**2
    vision, running = _vision(shape, patches, work)
    transient = _transient(shape, parallel, work, max(0.0, running / parallel.tp - kept - working))
    if work.is_optimizer_offloaded:
        # Moments are there during the update, activations before it: what both need is needed once.
        optimizer = optimizer / 3 + max(0.0, optimizer * 2 / 3 - kept - working - transient)
    return Plan(
        weights=sum(BF16 * count for _, count in held),
        gradients=sum(FP32 * count for _, count in trained),
        optimizer=int(optimizer),
        activations=int(kept + working),
        transient=int(transient),
        vision=int(vision),
    )


def largest_micro_batch(
    config: Mapping[str, Any],
    parallel: ParallelConfig,
    work: Workload,
    capacity_bytes: int = int(H200_BYTES * USABLE),
    step: int = 1024,
    limit: int = 262144,
) -> int:
    """The most tokens (a multiple of `step`, at most `limit`) that fit into `capacity_bytes`; 0 when not even `step` does."""
    from dataclasses import replace

    fits = 0
    low, high = 1, limit // step
    while low <= high:
        middle = (low + high) // 2
        total = plan(config, parallel, replace(work, num_tokens=middle * step)).total
        if total <= capacity_bytes:
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    return fits * step


def attention_layer(shape: ModelShape) -> tuple[Saved, ...]:
    """What full attention keeps: the norm's input and output, heads as the norms read them, rotated heads, output and gate.

    The projection's own output is given up once its heads are copied apart; values stay in it as a view where there is no gate.
    """
    gate = (
        (Saved("gate", shape.queries, BF16, "tp"), Saved("gated output", shape.queries, BF16, "tp"))
        if shape.has_output_gate
        else ()
    )
    return (
        Saved("input", shape.hidden, BF16, "sp"),
        Saved("normalised", shape.hidden, BF16, "sp"),
        Saved("queries and keys", shape.queries + shape.keys, BF16, "tp"),
        Saved("rotated queries and keys", shape.queries + shape.keys, BF16, "tp"),
        Saved("values", shape.keys, BF16, "tp"),
        Saved("attention output", shape.queries, BF16, "tp"),
        Saved("log-sum-exp", shape.num_heads, FP32, "tp"),
        *gate,
    )


def gdn_layer(shape: ModelShape) -> tuple[Saved, ...]:
    """What gated delta net keeps. Its input is gathered over sequence-parallel ranks before the projection, so it is whole."""
    heads, keys = shape.gdn_value_heads, shape.gdn_key_heads * shape.gdn_key_dim
    return (
        Saved("input", shape.hidden, BF16, "whole"),
        Saved("normalised", shape.hidden, BF16, "whole"),
        Saved("convolution input", shape.gdn_qkv, BF16, "tp"),
        Saved("normalised queries and keys", 2 * keys, BF16, "tp"),
        Saved("repeated queries and keys", 2 * heads * shape.gdn_key_dim, BF16, "tp"),
        Saved("values", shape.gdn_values, BF16, "tp"),
        Saved("decay and beta", 5 * heads, FP32, "tp"),
        Saved("chunk matrix", GDN_CHUNK * heads, BF16, "tp"),
        Saved("output and normalised output", 2 * shape.gdn_values, BF16, "tp"),
        Saved("gate and gated output", 2 * shape.gdn_values, BF16, "tp"),
    )


def ffn_layer(shape: ModelShape, ep: int = 1) -> tuple[Saved, ...]:
    """What a feed-forward layer, dense or of experts, keeps. Experts are assumed to be loaded evenly.

    ep > 1: an expert is whole on its rank, and a rank computes the tokens that tensor parallelism would have divided.
    """
    entry = (
        Saved("ffn input", shape.hidden, BF16, "sp"),
        Saved("ffn normalised", shape.hidden, BF16, "sp"),
    )
    if not shape.num_experts:
        return (*entry, *_swiglu("ffn", shape.ffn, 1))
    shared = _swiglu("shared", shape.shared_ffn, 1) if shape.shared_ffn else ()
    # With ep = 1 each tensor-parallel rank computes its slice of all tokens' experts: their inputs are whole there.
    ends: Literal["sp", "whole"] = "sp" if ep > 1 else "whole"
    return (
        *entry,
        Saved("router", 3 * shape.num_experts, FP32, "sp"),
        Saved("dispatched", 2 * shape.top_k * shape.hidden, BF16, ends),
        *_swiglu("experts", shape.expert_ffn, shape.top_k),
        Saved("experts' output", shape.top_k * shape.hidden, BF16, ends),
        *shared,
    )


def _swiglu(name: str, width: int, times: int) -> tuple[Saved, ...]:
    return (
        Saved(f"{name} gate and up", 2 * width * times, BF16, "tp"),
        Saved(f"{name} product", width * times, BF16, "tp"),
    )


def bytes_per_token(table: tuple[Saved, ...], parallel: ParallelConfig) -> float:
    """Bytes a token of one rank."""
    is_split = {"tp": True, "sp": parallel.sequence_parallel, "whole": False}
    return sum(
        entry.width * entry.bytes_each / (parallel.tp if is_split[entry.split] else 1) for entry in table
    )


def _activations(shape: ModelShape, parallel: ParallelConfig, work: Workload) -> tuple[float, float]:
    """(kept by all layers, kept by the one layer that is recomputed)."""
    ffn = bytes_per_token(ffn_layer(shape, parallel.ep), parallel)
    each = {
        "full_attention": bytes_per_token(attention_layer(shape), parallel) + ffn,
        "linear_attention": bytes_per_token(gdn_layer(shape), parallel) + ffn,
    }
    if work.recompute == "full":
        inputs = shape.hidden * BF16 / (parallel.tp if parallel.sequence_parallel else 1)
        return work.num_tokens * inputs * len(shape.layers), work.num_tokens * max(
            each[kind] for kind in set(shape.layers)
        )
    kept = sum(each[kind] for kind in shape.layers)
    if work.recompute == "selective":
        kept -= shape.layers.count("full_attention") * (
            (shape.queries * BF16 + shape.num_heads * FP32) / parallel.tp
        )
    return work.num_tokens * kept, 0.0


def _transient(shape: ModelShape, parallel: ParallelConfig, work: Workload, on_tower: float) -> float:
    """What comes on top of kept activations at the worst moment. on_tower: what the vision tower needs beyond them."""
    rows = work.num_tokens * work.trained_share
    logits = min(HEAD_KEEP_BYTES, rows * shape.vocab * BF16 / parallel.tp)
    weight = shape.vocab * shape.hidden * BF16 / parallel.tp
    head = logits + max(HEAD_BLOCK_BYTES, weight) + rows * shape.hidden * (2 * BF16 + FP32)
    whole = 2 * shape.hidden * BF16
    layer = max(_backward_width(shape, kind) for kind in set(shape.layers)) * BF16 / parallel.tp
    return max(head, work.num_tokens * (layer + whole), on_tower)


def _backward_width(shape: ModelShape, kind: str) -> float:
    """Numbers a token that the backward of a layer's widest part holds beside what was kept.

    Feed-forward: the gradients of product, gate and up. Attention: of queries (fp32 as well), output and gate. Gated delta net:
    states and their gradients at the chunks' ends, and its eight tensors of the values' width that are computed again or differentiated.
    """
    ffn = 3 * (shape.ffn or shape.top_k * shape.expert_ffn + shape.shared_ffn)
    if kind == "full_attention":
        return max(ffn, 6 * shape.queries)
    states = shape.gdn_value_heads * shape.gdn_key_dim * shape.gdn_value_dim / GDN_CHUNK
    return max(ffn, 2 * states + 8 * shape.gdn_values)


def _vision(shape: ModelShape, patches: float, work: Workload) -> tuple[float, float]:
    """(kept through the micro-batch, on top while the tower runs): patches in fp32 and features; a block's tensors, attention's
    rotation in fp32 among them. A trained tower keeps its blocks, with full recompute their inputs only."""
    vision = shape.vision
    features = vision.out_hidden / vision.merge**2 * BF16 * (1 + vision.num_deepstack)
    kept = vision.patch_features * FP32 + features
    running = vision.patch_features * BF16 + 26 * vision.hidden + 2 * vision.hidden * BF16
    if not work.is_vision_frozen:
        block = BF16 * (10 * vision.hidden + 2 * vision.ffn)
        kept += vision.depth * (vision.hidden * BF16 if work.recompute == "full" else block)
        running = max(running, block)
    return patches * kept, patches * running


def _on_rank(kind: Parameters, parallel: ParallelConfig) -> int:
    divisor = {"tp": parallel.tp, "whole": 1, "expert": parallel.ep if parallel.ep > 1 else parallel.tp}
    return kind.count // divisor[kind.split]


def _optimizer_ranks(kind: Parameters, parallel: ParallelConfig, work: Workload) -> int:
    """Ranks that a kind's optimiser state is spread over."""
    if not work.is_optimizer_distributed:
        return 1
    if kind.split == "expert" and parallel.ep > 1:
        return max(1, parallel.tp * parallel.dp // parallel.ep)
    return parallel.dp * parallel.cp
