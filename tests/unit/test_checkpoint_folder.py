"""A Hugging Face folder that is not whole is refused by name, before a tensor is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_cua.config.trainer import ParallelConfig
from slime_cua.convert import check_hf_folder, tensor_table
from slime_cua.core.errors import CheckpointError, ConfigError
from slime_cua.trainer.layouts import check_divisibility
from tests.numerics.tiny_models import make_qwen35

NORM = "model.language_model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen35(tmp_path_factory.mktemp("model") / "whole", ("linear_attention", "full_attention"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_whole_folder_passes_and_its_table_has_every_tensor(folder: Path) -> None:
    table = check_hf_folder(folder)
    stored = load_file(folder / "model.safetensors")
    assert {name: info.shape for name, info in table.items()} == {
        k: tuple(v.shape) for k, v in stored.items()
    }
    assert {info.dtype for info in table.values()} == {"BF16"}


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop(NORM))  # type: ignore[arg-type, return-value]
    with pytest.raises(CheckpointError, match=f"lacks 1 of the .* tensors .* first {NORM}"):
        check_hf_folder(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.left_over": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=r"does not ask for, first model\.left_over"):
        check_hf_folder(folder)


def test_multi_token_prediction_tensors_may_be_there(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(2, 2)}))
    assert "mtp.fc.weight" in check_hf_folder(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: torch.zeros(7)}))
    with pytest.raises(CheckpointError, match=rf"{NORM} .* shape \[7\]; its config.json asks for \[64\]"):
        check_hf_folder(folder)


def test_a_truncated_file_is_told_from_its_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is truncated: \d+ bytes, its header needs \d+"
    ):
        tensor_table(folder)


@pytest.mark.parametrize("header", ["[]", '{"a": {}}', '{"a": 1}', '{"a'])
def test_a_header_that_does_not_describe_tensors_is_refused(folder: Path, header: str) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a broken safetensors header: copy it"):
        tensor_table(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "{"])
def test_an_index_that_names_no_shards_is_refused(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is broken"):
        tensor_table(folder)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64")])
def test_a_tensor_that_could_not_be_given_back_is_named_with_its_dtype(
    folder: Path, dtype: torch.dtype, name: str
) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    with pytest.raises(CheckpointError, match=f"tensor {NORM} .* {name}; .*give the checkpoint that is not"):
        check_hf_folder(folder)


@pytest.mark.parametrize("content", [b"", b"\x10\x00", b"\xff" * 64], ids=["empty", "short", "nonsense"])
def test_a_file_that_is_no_safetensors_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated or no safetensors file"):
        tensor_table(folder)


def split_in_shards(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    half = len(names) // 2
    shards = {
        "model-00001-of-00002.safetensors": names[:half],
        "model-00002-of-00002.safetensors": names[half:],
    }
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_a_sharded_folder_passes_and_a_missing_shard_is_named(folder: Path) -> None:
    weight_map = split_in_shards(folder)
    assert {name: info.file for name, info in check_hf_folder(folder).items()} == weight_map
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"shard model-00002-of-00002\.safetensors .* is missing; \d+ tensors"
    ):
        check_hf_folder(folder)


def test_a_tensor_that_the_index_places_wrongly_is_named(folder: Path) -> None:
    weight_map = split_in_shards(folder)
    weight_map[NORM] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=f"tensor {NORM} is not in model-00002"):
        check_hf_folder(folder)


def test_a_missing_folder_and_a_folder_without_config_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist; give a Hugging Face checkpoint folder"):
        check_hf_folder(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        check_hf_folder(tmp_path)


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(CheckpointError, match="NoSuchModel"):
        check_hf_folder(folder)


@pytest.mark.parametrize("fault", [{"hidden_size": "wide"}, {"num_hidden_layers": 5}, {"hidden_act": "no"}])
def test_a_config_that_transformers_makes_no_model_of_is_refused(
    folder: Path, fault: dict[str, object]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"].update(fault)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=str(folder)):
        check_hf_folder(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder: Path) -> None:
    tokenizer = {"model": {"vocab": {"a": 0, "b": 384}}, "added_tokens": [{"id": 5}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="token id 384 is beyond the model's vocab_size 384"):
        check_hf_folder(folder)


def test_tp_that_does_not_divide_heads_is_refused_with_the_legal_ones(folder: Path) -> None:
    check_divisibility(folder, ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match=r"tp = 3 does not divide num_attention_heads = 4 .* legal: 1, 2"):
        check_divisibility(folder, ParallelConfig(tp=3))


def test_more_tp_ranks_than_key_value_heads_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tp = 4 does not divide num_key_value_heads = 2 \(key/value heads\)"
    ):
        check_divisibility(folder, ParallelConfig(tp=4))


def test_expert_parallelism_without_experts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"ep = 2 needs a model whose experts \(0\) it divides"):
        check_divisibility(folder, ParallelConfig(ep=2))
