"""The conversion commands give a folder back byte for byte, also through a trainer of another layout, in little memory both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_cua.config.trainer import OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.core.errors import CheckpointError
from slime_cua.launch.convert import main
from slime_cua.trainer.group import LocalTrainerGroup
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.tiny_models import (
    FULL,
    HYBRID,
    make_qwen3vl_moe,
    make_qwen35,
    make_qwen35_moe,
    store_experts,
)
from tests.numerics.trainer_cases import make_samples

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def rewrite(
    folder: Path,
    change: Callable[[str, torch.Tensor], torch.Tensor],
    more: dict[str, torch.Tensor] | None = None,
) -> None:
    """Another model.safetensors: every tensor changed, and `more`."""
    tensors = {name: change(name, x) for name, x in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, **(more or {})}, folder / "model.safetensors", metadata={"format": "pt"})


def there_and_back(source: Path, scratch: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    assert main(["to-megatron", "--hf", str(source), "--out", str(scratch / "run")]) == 0
    back = ["--checkpoint", str(scratch / "run"), "--hf", str(source), "--out", str(scratch / "back")]
    assert main(["to-hf", *back]) == 0
    return files_of(scratch / "back"), files_of(source)


def test_a_converted_folder_starts_a_trainer_at_tp2_anew_and_comes_back_byte_equal(tmp_path: Path) -> None:
    source = make_qwen35(tmp_path / "source", HYBRID, is_tied=False)
    found, wanted = there_and_back(source, tmp_path)
    assert found == wanted
    samples, store = make_samples()
    config = TrainerConfig(
        parallel=ParallelConfig(tp=2), max_tokens_per_rank=512, optimizer=OptimizerConfig(lr=1e-3)
    )
    with LocalTrainerGroup(config, start_timeout_s=600) as trainer:
        trainer.call("load", source)
        runs = []
        for _ in range(2):
            runs.append([trainer.call("train_step", samples, store, "sft") for _ in range(3)])
            assert trainer.call("restore", tmp_path / "run") == 0
        trainer.call("export_hf", tmp_path / "exported")
    assert files_of(tmp_path / "exported") == wanted
    for first, second in zip(*runs, strict=True):
        assert second["sft/loss"] == first["sft/loss"]
        assert second["sft/grad_norm"] == first["sft/grad_norm"]


@pytest.mark.parametrize(
    ("make", "layout"),
    [(make_qwen35_moe, "out_in"), (make_qwen35_moe, "split"), (make_qwen3vl_moe, "in_out")],
)
def test_experts_come_back_byte_equal_in_the_layout_they_had(
    make: Callable[[Path], Path], layout: str, tmp_path: Path
) -> None:
    found, wanted = there_and_back(store_experts(make(tmp_path / "source"), layout), tmp_path)
    assert found == wanted


def test_a_tied_head_comes_back_byte_equal(tmp_path: Path) -> None:
    found, wanted = there_and_back(make_qwen35(tmp_path / "source", FULL, is_tied=True), tmp_path)
    assert found == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_bf16_would_round_come_back_byte_equal(dtype: torch.dtype, tmp_path: Path) -> None:
    source = make_qwen35(tmp_path / "source", HYBRID, is_tied=False)
    rewrite(source, lambda name, tensor: (tensor.float() + 1e-3).to(dtype))
    found, wanted = there_and_back(source, tmp_path)
    assert found == wanted


def test_one_tensor_in_float32_and_heads_that_are_not_trained_come_back_byte_equal(tmp_path: Path) -> None:
    """As published: norms of gated delta net in float32 between bf16 weights, MTP heads, a vocabulary that is no round number."""
    source = make_qwen35(tmp_path / "source", HYBRID, is_tied=False, vocab_size=383)
    heads = {"mtp.fc.weight": torch.randn(3, 5).bfloat16(), "mtp.norm.weight": torch.randn(7)}
    norm = "linear_attn.norm.weight"
    rewrite(source, lambda name, tensor: tensor.float() + 1e-3 if name.endswith(norm) else tensor, heads)
    found, wanted = there_and_back(source, tmp_path)
    assert found == wanted


def test_a_bf16_trainer_starts_from_a_conversion_in_float32(tmp_path: Path) -> None:
    source = make_qwen35(tmp_path / "source", HYBRID, is_tied=False)
    rewrite(source, lambda name, tensor: tensor.float() + 1e-3)
    assert main(["to-megatron", "--hf", str(source), "--out", str(tmp_path / "run")]) == 0
    samples, store = make_samples()
    trainer = TrainerRank(TrainerConfig(max_tokens_per_rank=512, optimizer=OptimizerConfig(lr=1e-3)))
    try:
        trainer.load(source)
        wanted = trainer.logprobs(samples, store)
        losses = [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(2)]
        assert losses[1] < losses[0] and trainer.logprobs(samples, store) != wanted
        assert trainer.restore(tmp_path / "run") == 0
        assert trainer.logprobs(samples, store) == wanted
        assert [trainer.train_step(samples, store, "sft")["sft/loss"] for _ in range(2)] == losses
    finally:
        trainer.close()


def test_a_checkpoint_of_another_model_leaves_no_folder(tmp_path: Path) -> None:
    source, other = make_qwen35(tmp_path / "source", FULL), make_qwen35(tmp_path / "other", HYBRID)
    assert main(["to-megatron", "--hf", str(source), "--out", str(tmp_path / "run")]) == 0
    arguments = ["--checkpoint", str(tmp_path / "run"), "--hf", str(other), "--out", str(tmp_path / "back")]
    with pytest.raises(CheckpointError, match="does not fit this model: give the folder of the model"):
        main(["to-hf", *arguments])
    assert not (tmp_path / "back").exists()


def test_an_optimiser_of_the_other_kind_is_refused_by_the_name_of_its_setting(tmp_path: Path) -> None:
    source = make_qwen35(tmp_path / "source", FULL)
    for is_distributed in (False, True):
        trainer = TrainerRank(TrainerConfig(dtype="fp32", use_distributed_optimizer=is_distributed))
        try:
            trainer.load(source)
            if is_distributed:
                with pytest.raises(CheckpointError, match="use_distributed_optimizer = false: continue with"):
                    trainer.restore(tmp_path / "saved")
            else:
                trainer.save(tmp_path / "saved", 1)
        finally:
            trainer.close()


def make_large(folder: Path) -> Path:
    """A hundred megabytes of bf16 weights in shards of at most forty."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    small = Qwen3_5Config.from_pretrained(make_qwen35(folder, FULL))
    text = {
        **small.text_config.to_dict(),
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "layer_types": ["full_attention"] * 12,
        "tie_word_embeddings": False,
    }
    vision = {**small.vision_config.to_dict(), "out_hidden_size": 512}
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=6)
    (folder / "model.safetensors").unlink()
    model = Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40MB")
    return folder


MEASURE = """
import sys
from pathlib import Path
from slime_cua.trainer.stream_export import stream_to_hf
from slime_cua.trainer.stream_import import stream_to_megatron

def status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) << 10

source, scratch = map(Path, sys.argv[1:])
ways = {
    "in": lambda turn: stream_to_megatron(source, scratch / f"run{turn}"),
    "out": lambda turn: stream_to_hf(scratch / f"run{turn}", source, scratch / f"back{turn}"),
}
for name, convert in ways.items():
    convert(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    convert(1)
    print("PEAK", name, status("VmHWM") - before)
"""


def test_both_ways_take_less_than_twice_the_largest_shard(tmp_path: Path) -> None:
    source = make_large(tmp_path / "source")
    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    assert len(shards) >= 3
    # Freed memory goes back at once, so that the second run's peak is its own.
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, str(source), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    peaks = dict(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("PEAK"))
    assert set(peaks) == {"in", "out"}
    print({name: f"{int(peak) >> 20} MiB" for name, peak in peaks.items()}, f"of {max(shards) >> 20} MiB")
    for name, peak in peaks.items():
        assert int(peak) < 2 * max(shards), (
            f"{name}: {int(peak) >> 20} MiB with a largest shard of {max(shards) >> 20} MiB"
        )
    for path in source.glob("*.safetensors"):
        assert (tmp_path / "back1" / path.name).read_bytes() == path.read_bytes()
