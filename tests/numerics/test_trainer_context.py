"""Context parallelism: sequences cut over ranks give the log-probs and gradients of transformers, and of attention in float64.

Models of full attention that mcore-bridge builds with it: Qwen3 (text) and Qwen3-VL with deepstack; images lie across the cuts.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_patches.te_standin.attention import DotProductAttention
from slime_cua.config.trainer import LoraConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from slime_cua.trainer.context import own_tokens
from slime_cua.trainer.group import LocalTrainerGroup
from tests.numerics.hf_reference import reference
from tests.numerics.test_trainer_layouts import worst_gradient
from tests.numerics.tiny_models import make_qwen3, make_qwen3vl
from tests.numerics.trainer_cases import samples_for
from tests.numerics.trainer_matrix import run_layouts
from tests.numerics.two_ranks import run_ranks
from tests.numerics.warm_ranks import warm_groups

CASES = (("cp2", "text"), ("cp2", "vl"), ("cp2_tp2_sp", "vl"), ("cp2_dp2", "vl"))
LENGTHS = (8, 24, 16)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    scratch = tmp_path_factory.mktemp("models")
    return {"text": make_qwen3(scratch / "text"), "vl": make_qwen3vl(scratch / "vl")}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> dict[str, Any]:
    two, four = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("four")
    return {
        **run_layouts(two / "out.pt", ("cp2", "cp2_distopt", "dp2_distopt"), list(folders.values())),
        **run_layouts(four / "out.pt", ("cp2_tp2_sp", "cp2_dp2"), [folders["vl"]]),
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    return {name: reference(folder, *samples_for(folder)) for name, folder in folders.items()}


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_logprobs_equal_transformers(
    results: dict[str, Any], expected: dict[str, Any], layout: str, model: str
) -> None:
    for found, wanted in zip(results[f"{layout}/{model}"]["logp"], expected[model]["logp"], strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("layout", "model"), CASES[:3])
def test_every_gradient_and_the_norm_equal_transformers(
    results: dict[str, Any], expected: dict[str, Any], layout: str, model: str
) -> None:
    found = results[f"{layout}/{model}"]
    error, name = worst_gradient(found["grads"], expected[model]["grads"])
    assert error < 1e-4, f"{name}: {error:.1e}"
    assert found["norm"] == pytest.approx(expected[model]["norm"], rel=1e-5)


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_supervised_and_policy_steps_are_those_of_data_parallel_ranks(
    results: dict[str, Any], layout: str, model: str
) -> None:
    found, wanted = results[f"{layout}/{model}"], results[f"dp2_distopt/{model}"]
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-4)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-3)
    assert found["one_sample"] == pytest.approx(wanted["one_sample"], rel=1e-4)
    assert found["empty"]["loss/is_skipped"] == 1
    for name in ("loss/policy", "loss/entropy", "loss/ratio_mean", "loss/num_trained_tokens"):
        assert found["gspo"][name] == pytest.approx(wanted["gspo"][name], rel=1e-3), name


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_export_of_untrained_weights_is_bit_equal(
    results: dict[str, Any], folders: dict[str, Path], layout: str, model: str
) -> None:
    source, found = (
        load_file(folders[model] / "model.safetensors"),
        results[f"{layout}/{model}"]["export"],
    )
    assert set(found) == set(source)
    assert [k for k, v in source.items() if found[k].dtype != v.dtype or not torch.equal(found[k], v)] == []


@pytest.mark.parametrize("model", ["text", "vl"])
def test_a_run_saved_with_sequences_cut_continues_with_data_parallel_ranks(
    results: dict[str, Any], model: str
) -> None:
    resumed = results[f"resumed/{model}"]
    assert resumed["step"] == 2
    assert resumed["losses"] == pytest.approx(results[f"cp2_distopt/{model}"]["losses"][2:], abs=1e-4)


def test_adapters_train_alike_with_sequences_cut(folders: dict[str, Path]) -> None:
    samples, store = samples_for(folders["vl"])
    found = []
    for cp in (1, 2):
        config = TrainerConfig(
            dtype="fp32",
            parallel=ParallelConfig(cp=cp),
            max_tokens_per_rank=512,
            lora=LoraConfig(rank=4, alpha=8),
            optimizer=OptimizerConfig(lr=1e-2),
        )
        with warm_groups(), LocalTrainerGroup(config, start_timeout_s=600) as trainer:
            trainer.call("load", folders["vl"])
            losses = [trainer.call("train_step", samples, store, "sft")["sft/loss"] for _ in range(3)]
            found.append((losses, trainer.call("logprobs", samples, store)))
    (losses, logps), (cut_losses, cut_logps) = found
    assert cut_losses == pytest.approx(losses, abs=1e-4) and losses[2] < losses[0] - 0.05
    for own, wanted in zip(cut_logps, logps, strict=True):
        torch.testing.assert_close(torch.tensor(own), torch.tensor(wanted), atol=1e-3, rtol=0)


def problem() -> tuple[list[torch.Tensor], list[int]]:
    """Queries, keys, values (4 heads over 2) and the weights of their output in the loss; ends of three sequences."""
    generator = torch.Generator().manual_seed(4)
    shapes = [(sum(LENGTHS), heads, 8) for heads in (4, 2, 2)] + [(sum(LENGTHS), 32)]
    ends = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes], ends


def plain() -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values of whole sequences, by the formula in float64."""
    (q, k, v, weight), ends = problem()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outputs = []
    for begin, end in itertools.pairwise(ends):
        scores = torch.einsum("ind,jnd->nij", q[begin:end], k[begin:end].repeat_interleave(2, 1)) / 8**0.5
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        share = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("nij,jnd->ind", share, v[begin:end].repeat_interleave(2, 1)).flatten(1))
    y = torch.cat(outputs)
    (y * weight).sum().backward()
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


def cut_over_ranks(group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This rank's rows of the same."""
    (q, k, v, weight), ends = problem()
    mine = own_tokens(ends, dist.get_world_size(group), dist.get_rank(group))
    leaves = [x[mine].clone().requires_grad_() for x in (q, k, v)]
    cu = torch.tensor(ends, dtype=torch.int32)
    attention = DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal", cp_group=group)
    packed = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": max(LENGTHS)}
    for other in ({"window_size": (4, 0)}, {"qkv_format": "sbhd"}, {"attn_mask_type": "padding"}):
        with pytest.raises(NotImplementedError, match="context parallel attention here is causal, packed"):
            attention(*leaves, **{**packed, **other})
    y = attention(*leaves, **packed)
    (y * weight[mine]).sum().backward()
    return [y.detach(), *(x.grad for x in leaves if x.grad is not None)]


@pytest.mark.parametrize("world", [2, 4])
def test_attention_cut_over_ranks_is_that_of_whole_sequences_in_float64(world: int, tmp_path: Path) -> None:
    _, ends = problem()
    wanted = plain()
    for rank, found in enumerate(run_ranks(__name__, "cut_over_ranks", tmp_path, world)):
        mine = own_tokens(ends, world, rank)
        assert len(found) == len(wanted) == 4
        for own, whole in zip(found, wanted, strict=True):
            torch.testing.assert_close(own, whole[mine], atol=1e-12, rtol=0)


def asked_over_ranks(group: dist.ProcessGroup) -> list[str]:
    """What a trainer's question says of a right kernel and of one that loses what other ranks add to a key's gradient."""
    import megatron_patches
    from megatron_patches.te_standin import attention

    megatron_patches.apply()
    from megatron.core import mpu

    from slime_cua.core.errors import ConfigError
    from slime_cua.trainer.attention_check import check_packed_attention
    from tests.numerics.test_attention_check import TEDotProductAttention

    mpu.initialize_model_parallel(1, context_parallel_size=dist.get_world_size(group))
    layer = TEDotProductAttention(lambda *x: x)
    layer.config.context_parallel_size = dist.get_world_size(group)
    layer._plain.set_context_parallel_group(group)
    answers = []
    real = attention.dist.all_reduce
    for all_reduce in (real, lambda *tensors, **options: None):
        attention.dist.all_reduce = all_reduce
        try:
            check_packed_attention(layer, torch.float32, torch.device("cpu"))
            answers.append("right")
        except ConfigError as error:
            answers.append(str(error))
        finally:
            attention.dist.all_reduce = real
    mpu.destroy_model_parallel()
    return answers


def test_a_trainer_asks_its_attention_also_over_ranks(tmp_path: Path) -> None:
    for right, wrong in run_ranks(__name__, "asked_over_ranks", tmp_path, 2):
        assert right == "right"
        assert "packed attention is wrong on this machine: the gradient of keys" in wrong or "values" in wrong


def test_shares_are_the_worked_ones() -> None:
    assert own_tokens([0, 4, 12], 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert own_tokens([0, 4, 12], 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
