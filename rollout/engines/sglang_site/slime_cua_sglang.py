"""What an SGLang server must do otherwise to train on what it samples; SGLang loads it as a plugin of its own framework.

Runs in the interpreter of the SGLang environment, which need not have our dependencies: the launcher puts this folder, with
its entry point, on the server's path. Written for SGLang 0.5.17; every hook says what it mends and what shows it.

1. Qwen3.5's fused norm-rope-gate kernel reads one position a token, and M-RoPE has three: height and width of image
   tokens are lost, clicks land elsewhere. Shows in: the canary on image-conditioned tokens.
2. `/pause_generation` in mode abort looks again only after a whole second. Shows in: `paused` of a publish.
3. An update says nothing about what arrived. Each tensor's digest is kept as it comes and given out by
   `/weights_checker`, so that the publisher can compare count and checksums by Hugging Face name, and the copy into the
   model is complete before the update is answered: the sender's memory may be used again.
4. Features of images outlive their vision tower: they are cached by image, and neither a flush nor an update drops them.
   Shows in: the canary after an update of a trained vision tower.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

RECEIVED = "received:"
"""Prefix of a received tensor's name among the names of SGLang's own checksums."""
_VISION = "visual."
_PAUSE_POLL_S = 0.01
_MODELS = (
    "qwen3_5.Qwen3_5ForConditionalGeneration",
    "qwen3_5.Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl.Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration",
    "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration",
)

_received: dict[str, str] = {}
"""Name -> digest of the tensor that came last; empty for one that the server read when it started."""
_has_started = False


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: called once in each of the server's processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        "sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer.forward_prepare_cuda_fused": rotate_by_all_positions,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation": pause_soon,
        "sglang.srt.utils.weight_checker.WeightChecker.handle": add_received,
        **{f"sglang.srt.models.{model}.load_weights": note_received for model in _MODELS},
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def rotate_by_all_positions(
    original: Callable[..., Any], layer: Any, positions: Any, hidden_states: Any
) -> Any:
    """`positions` [3, T] (M-RoPE) go the unfused way; the fused kernel would read row 0 only."""
    if positions.ndim == 2:
        return layer.forward_prepare_native(positions, hidden_states)
    return original(layer, positions=positions, hidden_states=hidden_states)


async def pause_soon(original: Callable[..., Any], manager: Any, request: Any) -> None:
    """Pause in mode abort as soon as the last running request has its answer."""
    if request.mode != "abort":
        await original(manager, request)
        return
    async with manager.is_pause_cond:
        manager.is_pause = True
        while True:
            manager.abort_request(abort_all=True)
            if not await manager.model_update_lock.is_locked():
                return
            await asyncio.sleep(_PAUSE_POLL_S)


def note_received(
    original: Callable[..., Any],
    model: Any,
    weights: Iterable[tuple[str, Any]],
    *arguments: Any,
    **options: Any,
) -> Any:
    """Load, keep a digest of every tensor as it came, and return when the device has copied all of them."""
    global _has_started
    import torch

    noted = _noted(weights, with_digest=_has_started)
    before = {name: digest for name, digest in _received.items() if _VISION in name}
    loaded = original(model, list(noted) if isinstance(weights, list) else noted, *arguments, **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if _has_started and any(_received[name] != digest for name, digest in before.items()):
        drop_image_features()
    _has_started = True
    return loaded


def drop_image_features() -> None:
    """The vision tower has other weights than when they were computed."""
    from sglang.srt.managers import mm_utils

    if mm_utils.embedding_cache is not None:
        mm_utils.embedding_cache.clear()


def _noted(weights: Iterable[tuple[str, Any]], with_digest: bool) -> Iterator[tuple[str, Any]]:
    import torch

    from slime_cua.convert.weight_stream import tensor_digest

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, tensor in weights:
        _received[name] = tensor_digest(tensor.to(device)) if with_digest else ""
        yield name, tensor


def add_received(
    original: Callable[..., Any], checker: Any, action: str, *arguments: Any, **options: Any
) -> Any:
    """SGLang's checksums of its own layout, and ours of what came, under `received:NAME`."""
    answer = original(checker, action, *arguments, **options)
    if action == "checksum" and isinstance(answer, dict):
        answer["checksums"] |= {f"{RECEIVED}{name}": digest for name, digest in _received.items()}
    return answer
