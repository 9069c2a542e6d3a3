"""The memory planner: parameter counts against transformers' own classes, bytes against numbers worked by hand."""

import dataclasses
import json

import pytest

from slime_cua.config.trainer import ParallelConfig
from slime_cua.core.errors import ConfigError
from slime_cua.launch import plan as command
from slime_cua.trainer.plan import (
    Workload,
    attention_layer,
    bytes_per_token,
    ffn_layer,
    gdn_layer,
    largest_micro_batch,
    plan,
)
from slime_cua.trainer.sizes import PRESETS, ModelShape, parameters, vision_parameters

DENSE, MOE = PRESETS["Qwen3.5-27B"], PRESETS["Qwen3.5-35B-A3B"]


def counted(config):
    """Parameters of transformers' class on the meta device: (all, of them the vision tower's)."""
    import torch
    import transformers

    kinds = {
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
        "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
        "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    }
    config_name, model_name = kinds[config["model_type"]]
    if "vision_config" in config:
        built = getattr(transformers, config_name)(
            text_config=dict(config["text_config"]), vision_config=dict(config["vision_config"])
        )
        built.tie_word_embeddings = built.text_config.tie_word_embeddings
    else:
        built = getattr(transformers, config_name)(**config)
    with torch.device("meta"):
        model = getattr(transformers, model_name)(built)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    return sum(sizes.values()), sum(n for name, n in sizes.items() if ".visual." in name)


def small(kind, **text):
    base = MOE if "moe" in kind else DENSE
    tiny = {
        "hidden_size": 64,
        "vocab_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    if "moe" in kind:
        tiny |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 40,
        }
    else:
        tiny["intermediate_size"] = 112
    vision = {
        **base["vision_config"],
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 64,
    }
    if "vl" in kind:
        vision["deepstack_visual_indexes"] = [0, 1]
    return {
        "model_type": kind,
        "text_config": {**base["text_config"], **tiny, **text},
        "vision_config": vision,
    }


TEXT = {
    "model_type": "qwen3",
    **{name: value for name, value in small("qwen3_5")["text_config"].items() if "linear" not in name},
}


@pytest.mark.parametrize(
    "config",
    [
        TEXT,
        small("qwen3_5"),
        small("qwen3_5", tie_word_embeddings=True),
        small("qwen3_5_moe"),
        small("qwen3_vl"),
        small("qwen3_vl_moe"),
        DENSE,
        MOE,
    ],
    ids=["qwen3", "qwen3_5", "tied", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "27B", "35B-A3B"],
)
def test_parameter_counts_are_those_of_transformers(config):
    shape = ModelShape.from_config(config)
    total, vision = counted(config)
    assert sum(p.count for p in parameters(shape)) == total
    assert vision_parameters(shape.vision) == vision


def test_a_text_model_needs_nothing_for_vision():
    found = plan(TEXT, ParallelConfig(tp=2, sequence_parallel=True), Workload(1024))
    assert found.vision == 0 and found.activations > 0


def test_the_35b_has_35_billion_parameters_of_which_about_3_work_on_a_token():
    shape = ModelShape.from_config(MOE)
    by_name = {p.name: p.count for p in parameters(shape)}
    assert sum(by_name.values()) == 35_107_181_936
    active = sum(by_name.values()) - by_name["vision"] - by_name["embedding"]
    active -= by_name["experts"] * (1 - shape.top_k / shape.num_experts)
    assert active / 1e9 == pytest.approx(2.9, abs=0.1)


def test_bytes_of_weights_gradients_and_optimiser_are_the_hand_worked_ones():
    """TP4 DP4: the text model but its norms is split over 4; norms and vision are whole. 2 + 4 + 12 / DP bytes."""
    split = 1_271_398_400 * 2 + 1_677_721_600 + 5_562_044_928 + 17_112_760_320
    text = split // 4 + 674_816
    found = plan(DENSE, ParallelConfig(tp=4, dp=4, sequence_parallel=True), Workload(32768))
    assert found.weights == 2 * (text + 460_730_096)
    assert found.gradients == 4 * text
    assert found.optimizer == 3 * text
    alone = Workload(32768, is_optimizer_distributed=False)
    assert plan(DENSE, ParallelConfig(tp=4, dp=4), alone).optimizer == 12 * text
    trained = plan(DENSE, ParallelConfig(tp=4, dp=4), Workload(32768, is_vision_frozen=False))
    assert trained.gradients == 4 * (text + 460_730_096)


def test_experts_are_spread_over_ep_and_their_optimiser_over_the_ranks_that_share_them():
    """EP8 on 8 ranks: each expert's state is on one rank, so DP does not divide it."""
    by_name = {p.name: p.count for p in parameters(ModelShape.from_config(MOE))}
    rest = sum(n for name, n in by_name.items() if name not in ("experts", "vision"))
    found = plan(MOE, ParallelConfig(ep=8, dp=8), Workload(1024))
    experts = by_name["experts"] // 8
    assert found.gradients == 4 * (rest + experts)
    assert found.optimizer == int(12 * rest / 8 + 12 * experts)


def test_a_layers_activations_are_the_hand_worked_ones():
    """27B, one rank. Attention: input and norm 2 x 10240; queries and keys 12288 + 2048, twice; values 2048; output, gate, gated
    output 3 x 12288; log-sum-exp 96. Feed-forward: 2 x 10240, 69632 + 34816. Gated delta net: input and norm 2 x 10240; into the
    convolution 20480; queries and keys 8192, repeated 24576; values 12288; decay 960; matrix 6144; 4 x 12288 of output and gate."""
    shape = ModelShape.from_config(DENSE)
    one = ParallelConfig()
    assert bytes_per_token(attention_layer(shape), one) == 20480 + 28672 + 2048 + 36864 + 96
    assert bytes_per_token(ffn_layer(shape), one) == 20480 + 69632 + 34816
    gdn = 20480 + 20480 + 8192 + 24576 + 12288 + 960 + 6144 + 49152
    assert bytes_per_token(gdn_layer(shape), one) == gdn
    two = ParallelConfig(tp=2, sequence_parallel=True)
    assert bytes_per_token(gdn_layer(shape), two) == 20480 + (gdn - 20480) / 2
    assert bytes_per_token(ffn_layer(shape), two) == (20480 + 104448) / 2
    assert bytes_per_token(ffn_layer(shape), ParallelConfig(tp=2)) == 20480 + 104448 / 2


def test_full_recompute_keeps_the_layers_inputs_and_one_layer():
    shape = ModelShape.from_config(DENSE)
    parallel = ParallelConfig(tp=4, dp=2, sequence_parallel=True)
    found = plan(DENSE, parallel, Workload(4096, recompute="full"))
    none = plan(DENSE, parallel, Workload(4096, recompute="none"))
    selective = plan(DENSE, parallel, Workload(4096, recompute="selective"))
    assert found.activations < none.activations / 15
    assert none.activations - selective.activations == 4096 * 16 * (12288 + 96) // 4
    inputs = 4096 * 64 * shape.hidden * 2 // 4
    assert inputs < found.activations < inputs + none.activations / 32


def test_the_largest_micro_batch_fits_and_the_next_one_does_not():
    parallel = ParallelConfig(tp=4, dp=2, sequence_parallel=True)
    work, capacity = Workload(1), 100 << 30
    most = largest_micro_batch(DENSE, parallel, work, capacity)
    assert plan(DENSE, parallel, dataclasses.replace(work, num_tokens=most)).total <= capacity
    assert plan(DENSE, parallel, dataclasses.replace(work, num_tokens=most + 1024)).total > capacity
    assert largest_micro_batch(DENSE, ParallelConfig(), work, 1 << 30) == 0


def test_offloading_the_optimiser_never_needs_more():
    for recompute in ("none", "full"):
        work = Workload(16384, recompute=recompute)
        parallel = ParallelConfig(tp=4, dp=2, sequence_parallel=True)
        off = dataclasses.replace(work, is_optimizer_offloaded=True)
        assert plan(DENSE, parallel, off).total < plan(DENSE, parallel, work).total


def test_an_illegal_layout_and_an_unknown_model_are_refused():
    with pytest.raises(ConfigError, match="tp = 8 does not divide num_key_value_heads = 4"):
        plan(DENSE, ParallelConfig(tp=8), Workload(1024))
    with pytest.raises(ConfigError, match=r"neither a folder .* Qwen3\.5-27B"):
        command.model_config("Qwen9")


def test_the_command_prints_the_parts_and_fails_when_they_do_not_fit(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small("qwen3_5")))
    assert command.main(["--model", str(path), "--gpus", "2", "--tp", "2", "--tokens", "1024"]) == 0
    assert "largest micro-batch: 262144 tokens a rank, 262144 over" in capsys.readouterr().out
    assert command.main(["--model", "Qwen3.5-27B", "--gpus", "8"]) == 1
    out = capsys.readouterr().out
    assert "total" in out and "largest micro-batch: 0" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "TRUNCATED"], "TRUNCATED is not valid JSON"),
        (["--model", "LIST"], "LIST must hold a JSON object"),
        (["--model", "LACKS"], "config.json lacks vocab_size"),
        (["--model", "Qwen3.5-27B", "--trained-share", "7"], "--trained-share 7.0: a share from 0 to 1"),
        (["--model", "Qwen3.5-27B", "--gpus", "6", "--tp", "4"], "--gpus 6 is no multiple of --tp 4"),
    ],
)
def test_what_cannot_be_planned_is_a_sentence(tmp_path, arguments, sentence):
    text = {name: value for name, value in DENSE["text_config"].items() if name != "vocab_size"}
    (tmp_path / "TRUNCATED").write_text('{"model_type": ')
    (tmp_path / "LIST").write_text("[]")
    (tmp_path / "LACKS").write_text(json.dumps({**DENSE, "text_config": text}))
    there = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in arguments]
    with pytest.raises(ConfigError, match=sentence):
        command.main(there)


@pytest.mark.parametrize("flag", ["--gpus", "--tp", "--ep", "--tokens"])
def test_counts_are_at_least_one(flag, capsys):
    with pytest.raises(SystemExit):
        command.main(["--model", "Qwen3.5-27B", flag, "0"])
    assert f"argument {flag}: 0: at least 1" in capsys.readouterr().err


def test_sequences_cut_over_ranks_share_the_optimiser_and_show_each_rank_their_images():
    config = small("qwen3_vl")
    one, two = (plan(config, ParallelConfig(cp=cp), Workload(2048)) for cp in (1, 2))
    assert (two.weights, two.activations) == (one.weights, one.activations)
    assert two.optimizer == one.optimizer // 2 and two.vision == 2 * one.vision


@pytest.mark.parametrize("name", PRESETS)
def test_the_tables_in_the_docs_are_the_commands(name):
    from pathlib import Path

    assert command.table(PRESETS[name]) in Path("docs/plan.md").read_text()
