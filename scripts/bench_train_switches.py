"""What scripts/bench_train.py switches off one by one, and what it reads of torch's memory in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

VARIANTS = {
    "all": "everything on",
    "no packing": "one segment a micro-batch, padded to the longest",
    "all rows": "every row through the fused head",
    "plain log-prob": "trained rows, fp32 logits and log-softmax of torch",
    "whole tower": "each tensor-parallel rank runs the tower over all images",
    "plain": "all four off: padding, all-row fp32 logits, undivided tower",
}
OFF = {
    "all": frozenset[str](),
    "no packing": frozenset({"packing"}),
    "all rows": frozenset({"rows"}),
    "plain log-prob": frozenset({"fused"}),
    "whole tower": frozenset({"split"}),
    "plain": frozenset({"packing", "rows", "fused", "split"}),
}


class Swap:
    """Set an attribute for the length of a block."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value

    def __enter__(self) -> None:
        self.had = self.name in vars(self.owner)
        self.old = getattr(self.owner, self.name)
        setattr(self.owner, self.name, self.value)

    def __exit__(self, *error: object) -> None:
        if self.had:
            setattr(self.owner, self.name, self.old)
        else:
            delattr(self.owner, self.name)


def without_packing(bench: Any) -> Swap:
    """One segment a micro-batch, padded to the longest of the batch."""
    from slime_cua.data.packing import pack

    trainer = bench.trainer
    batch = trainer._pack(bench.samples)
    lengths = [
        int(n)
        for share in batch.micro_batches
        for p in share
        for n in (p.cu_seqlens[1:] - p.cu_seqlens[:-1])[: p.num_segments]
    ]
    longest = max(lengths) + (-max(lengths)) % bench.parallel.tp

    def one_each(items: Any, is_zero_skipped: bool = False) -> Any:
        return pack(
            items,
            max_tokens=longest,
            num_dp=trainer.layout.dp_size,
            images=trainer._patches.tokens,
            pad_multiple=longest,
            is_zero_skipped=is_zero_skipped,
        )

    return Swap(trainer, "_pack", one_each)


def with_all_rows(bench: Any) -> Swap:
    """Every row but each stream's last goes through the head; the trained ones are picked afterwards."""
    model, torch = bench.trainer.model, bench.torch
    plain = model.logprobs

    def logprobs(
        batch: Any, temperature: float, with_entropy: bool = False, entropy_grad: bool = False
    ) -> Any:
        rows = torch.arange(len(batch.token_ids_T) - 1, device=batch.token_ids_T.device)
        whole = replace(batch, row_R=rows, target_R=batch.token_ids_T[1:])
        logp, entropy = plain(whole, temperature, with_entropy, entropy_grad)
        return logp[batch.row_R], None if entropy is None else entropy[batch.row_R]

    return Swap(model, "logprobs", logprobs)


def with_plain_logprob(bench: Any) -> Swap:
    """fp32 logits and Megatron's vocab-parallel cross-entropy in the place of the fused kernel."""
    from slime_cua.trainer import model as module

    def logprob(
        hidden: Any, weight: Any, target: Any, *, temperature: float, vocab_size: int, **ignored: Any
    ) -> tuple[Any, None]:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            vocab_parallel_cross_entropy,
        )

        logits = copy_to_tensor_model_parallel_region(hidden) @ weight.t()
        return -vocab_parallel_cross_entropy(logits.float() / temperature, target), None

    return Swap(module, "linear_logprob", logprob)


def with_whole_tower(bench: Any) -> Swap:
    """No division of images over tensor-parallel ranks."""
    return Swap(bench.trainer.model.vision, "_group", None)


SWITCHES = {
    "packing": without_packing,
    "rows": with_all_rows,
    "fused": with_plain_logprob,
    "split": with_whole_tower,
}


class Memory:
    """Bytes that torch has allocated at the turning points of steps, the most over micro-batches; 0 without CUDA."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.found: dict[str, int] = {}

    def note(self, name: str, size: int) -> None:
        """Keep the larger of the values of `name`."""
        self.found[name] = max(self.found.get(name, 0), size)

    def peak_since(self) -> int:
        """The highest since the last call."""
        cuda = self._torch.cuda
        if not cuda.is_available():
            return 0
        peak = int(cuda.max_memory_allocated())
        cuda.reset_peak_memory_stats()
        return peak

    def now(self) -> int:
        """At this moment."""
        return int(self._torch.cuda.memory_allocated()) if self._torch.cuda.is_available() else 0

    @contextmanager
    def watching(self, trainer: Any) -> Iterator[None]:
        """Record while `trainer` takes steps: before a forward, its peak, what it leaves, a backward's and an update's peak, and
        what each decoder layer leaves (with the layer's output)."""
        model, optimizer = trainer.model, trainer.optimizer
        forward, step = model.logprobs, optimizer.step

        def logprobs(*args: Any, **options: Any) -> Any:
            self.note("backward peak", self.peak_since())
            self.note("before forward", self.now())
            result = forward(*args, **options)
            self.note("forward peak", self.peak_since())
            self.note("after forward", self.now())
            return result

        def update(*args: Any, **options: Any) -> Any:
            self.note("backward peak", self.peak_since())
            result = step(*args, **options)
            self.note("update peak", self.peak_since())
            return result

        self.peak_since()
        with ExitStack() as stack:
            stack.enter_context(Swap(model, "logprobs", logprobs))
            stack.enter_context(Swap(optimizer, "step", update))
            for number, layer in enumerate(model._text.decoder.layers):
                stack.callback(self._watch_layer(layer, f"layer {number}").remove)
                stack.callback(layer.register_forward_hook(self._leave(f"layer {number}")).remove)
            yield

    def _watch_layer(self, layer: Any, name: str) -> Any:
        def enter(*ignored: Any) -> None:
            self._entered = self.now()

        return layer.register_forward_pre_hook(enter)

    def _leave(self, name: str) -> Any:
        def leave(*ignored: Any) -> None:
            self.note(name, self.now() - self._entered)

        return leave
