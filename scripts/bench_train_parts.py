"""What scripts/bench_train.py measures with: a random model's folder, segments of screenshots, options switched off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any


def write_random_folder(folder: Path, config: dict[str, Any]) -> None:
    """A Hugging Face folder of a config's architecture with normal weights of deviation 0.02, bf16, in shards of 2 GB."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from slime_cua.convert import expected_shapes

    folder.mkdir(parents=True, exist_ok=True)
    stem = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[config["model_type"]]
    text = {
        **config["text_config"],
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "mrope_section": [2, 1, 1] if config["text_config"]["head_dim"] < 64 else [11, 11, 10],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    }
    ids = {"image_token_id": 6, "video_token_id": 7, "vision_start_token_id": 3, "vision_end_token_id": 4}
    built = getattr(transformers, f"{stem}Config")(
        text_config=text, vision_config=config["vision_config"], **ids
    )
    built.architectures = [f"{stem}ForConditionalGeneration"]
    built.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    shards: list[dict[str, Any]] = [{}]
    for name, shape in expected_shapes(folder).items():
        tensor = torch.randn(shape, dtype=torch.bfloat16) * 0.02 if len(shape) > 1 else _vector(name, shape)
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > 2 << 30 and shards[-1]:
            shards.append({})
        shards[-1][name] = tensor
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in zip(names, shards, strict=True) for name in tensors}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "done").write_text("")


PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 1024, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _vector(name: str, shape: tuple[int, ...]) -> Any:
    """Norm gains near their neutral value, decays as a fresh gated delta net has them, other biases small."""
    import torch

    if name.endswith("A_log"):
        return torch.rand(shape).mul(15).add(1).log().to(torch.bfloat16)
    if name.endswith("dt_bias"):
        return torch.ones(shape, dtype=torch.bfloat16)
    is_gain = name.endswith("linear_attn.norm.weight") or (
        "visual" in name and "norm" in name and "weight" in name
    )
    return torch.full(shape, 1.0 if is_gain else 0.0, dtype=torch.bfloat16)


class Screens:
    """Distinct screenshots, made once and kept as PNG."""

    def __init__(self, width: int, height: int, number: int) -> None:
        import hashlib
        import io

        import numpy as np
        from PIL import Image

        from slime_cua.core.types import ImageRef

        self._png: dict[str, bytes] = {}
        self.refs = []
        for index in range(number):
            small = np.random.default_rng(index).integers(0, 255, (26, 47, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
            name = hashlib.sha256(file.getvalue()).hexdigest()
            self._png[name] = file.getvalue()
            self.refs.append(ImageRef(sha256=name, width_px=width, height_px=height))

    def get(self, ref: Any) -> bytes:
        """PNG bytes."""
        return self._png[ref.sha256]


def make_segments(trainer: Any, options: Any, num_dp: int) -> tuple[list[Any], Screens]:
    """Segments of ten screenshots that fill `--microbatches` micro-batches of each data-parallel rank, 7 % of tokens trained."""
    import numpy as np

    from slime_cua.core.types import Segment, TrainSample

    width, height = (96, 64) if options.tiny else (1504, 832)
    rows, columns = trainer._patches.token_grid(width, height)
    rng = np.random.default_rng(0)
    screens = Screens(width, height, 30)
    num_screens = 10
    step = rows * columns + 2
    trained = max(4, round(0.08 * step))
    size = num_screens * (step + trained + 20)
    per_batch = max(1, options.tokens // size)
    samples = []
    for index in range(per_batch * options.microbatches * num_dp):
        ids: list[int] = []
        steps: list[int] = []
        shown = [screens.refs[(3 * index + i) % len(screens.refs)] for i in range(num_screens)]
        for turn in range(num_screens):
            context = [3, 6, 4, *rng.integers(20, 300, 20).tolist()]
            response = rng.integers(20, 300, trained).tolist()
            ids += context + response
            steps += [-1] * len(context) + [turn] * trained
        segment = Segment(
            segment_id=f"s{index:04d}",
            episode_id="e",
            group_id="g",
            task_id="t",
            token_ids=tuple(ids),
            is_trained=tuple(s >= 0 for s in steps),
            logp=(0.0,) * len(ids),
            versions=tuple(0 if s >= 0 else -1 for s in steps),
            step_of_token=tuple(steps),
            step_types=("gui",) * num_screens,
            images=tuple(shown),
        )
        samples.append(TrainSample(segment=segment, advantage=1.0))
    return samples, screens


class _Swap:
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


def without_packing(bench: Any) -> _Swap:
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

    return _Swap(trainer, "_pack", one_each)


def with_all_rows(bench: Any) -> _Swap:
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

    return _Swap(model, "logprobs", logprobs)


def with_plain_logprob(bench: Any) -> _Swap:
    """fp32 logits and torch's log-softmax in the place of the fused kernel."""
    from slime_cua.trainer import model as module

    def logprob(
        hidden: Any, weight: Any, target: Any, *, temperature: float, vocab_size: int, **ignored: Any
    ) -> tuple[Any, None]:
        logits = (hidden @ weight.t())[:, :vocab_size].float() / temperature
        return logits.log_softmax(-1).gather(1, target[:, None])[:, 0], None

    return _Swap(module, "linear_logprob", logprob)


def with_whole_tower(bench: Any) -> _Swap:
    """No division of images over tensor-parallel ranks."""
    return _Swap(bench.trainer.model.vision, "_group", None)


SWITCHES = {
    "packing": without_packing,
    "rows": with_all_rows,
    "fused": with_plain_logprob,
    "split": with_whole_tower,
}
