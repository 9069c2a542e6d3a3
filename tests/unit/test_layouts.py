"""The table of legal layouts: what it allows for the models of the paper, and how the doctor tells a run's config."""

import json

import pytest

from slime_cua.config.trainer import ParallelConfig
from slime_cua.core.errors import ConfigError
from slime_cua.launch import doctor
from slime_cua.trainer.layouts import FAMILIES, layout_faults, legal_layouts, parts_of

DENSE = {
    "model_type": "qwen3_5",
    "text_config": {
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "intermediate_size": 17408,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}
EXPERTS = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
}


def test_the_27b_trains_at_tp_1_2_4_and_the_35b_at_tp_1_2_with_any_ep_that_divides_256():
    table = {axis.name: axis for axis in legal_layouts(DENSE)}
    assert table["tp"].legal == "1, 2, 4" and table["ep"].legal == "1"
    table = {axis.name: axis for axis in legal_layouts(EXPERTS)}
    assert table["tp"].legal == "1, 2"
    assert table["ep"].legal == "1, 2, 4, 8, 16, 32, 64, 128, 256"


@pytest.mark.parametrize(
    ("config", "parallel", "words"),
    [
        (DENSE, {"tp": 3}, "tp = 3 does not divide num_key_value_heads = 4"),
        (DENSE, {"tp": 8}, "tp = 8 does not divide num_key_value_heads = 4 .* legal: 1, 2, 4"),
        (DENSE, {"pp": 2}, "pp must be 1: this build has no pipeline schedule"),
        (DENSE, {"cp": 2}, "cp must be 1: megatron-core 0.16.1 has no context parallelism for gated delta"),
        (DENSE, {"ep": 2, "dp": 2}, r"ep = 2 needs a model whose experts \(0\)"),
        (EXPERTS, {"tp": 2}, "sequence_parallel must be true for experts with tp > 1"),
        (
            EXPERTS,
            {"ep": 3, "dp": 3},
            r"ep = 3 needs a model whose experts \(256\) it divides; legal: 1, 2, 4, 8",
        ),
        (EXPERTS, {"ep": 4, "dp": 2}, "ep = 4 does not divide tp x dp = 2"),
    ],
)
def test_an_illegal_layout_is_refused_with_its_reason(config, parallel, words):
    import re

    faults = layout_faults(config, ParallelConfig(**parallel))
    assert any(re.search(words, fault) for fault in faults), faults


@pytest.mark.parametrize(
    ("config", "parallel"),
    [
        (DENSE, {"tp": 4, "dp": 4, "sequence_parallel": True}),
        (EXPERTS, {"tp": 2, "ep": 8, "dp": 4, "sequence_parallel": True}),
        (EXPERTS, {"ep": 8, "dp": 8}),
    ],
)
def test_a_legal_layout_has_no_fault(config, parallel):
    assert layout_faults(config, ParallelConfig(**parallel)) == []


VL = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {
                "model_type": "qwen3_5",
                "text_config": {**DENSE["text_config"], "layer_types": ["full_attention"]},
            },
            "mcore-bridge 1.6.5 builds no Qwen3.5 model with it",
        ),
        ({"model_type": "qwen3_vl_moe", "text_config": {**VL, "num_experts": 4}}, "router replay"),
    ],
)
def test_full_attention_alone_is_refused_context_parallelism_for_its_own_reason(config, words):
    assert "gated delta net" not in parts_of(config)
    (fault,) = layout_faults(config, ParallelConfig(cp=2))
    assert fault.startswith("trainer.parallel.cp must be 1: ") and words in fault


@pytest.mark.parametrize(
    "config", [{"model_type": "qwen3", **VL}, {"model_type": "qwen3_vl", "text_config": VL}]
)
def test_dense_models_of_full_attention_take_context_parallelism(config):
    table = {axis.name: axis for axis in legal_layouts(config)}
    assert (table["cp"].legal, table["pp"].legal) == ("any", "1")
    assert layout_faults(config, ParallelConfig(cp=4, tp=2, sequence_parallel=True)) == []


def test_a_family_without_a_trainer_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"model_type 'llama' has no trainer here; .*qwen3_5_moe"):
        parts_of({"model_type": "llama"})
    assert len(FAMILIES) == 5


def test_the_doctor_prints_the_table_of_a_config_and_marks_what_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(EXPERTS))
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {tmp_path / 'model'}\ntrainer: {{parallel: {{tp: 2, ep: 8, dp: 4}}}}\n")
    findings = list(doctor._layout(config, []))
    text = doctor.report(findings)
    assert "layout tp" in text and "2; legal: 1, 2 (divides" in text
    assert [f.remedy for f in findings if f.remedy] == [
        "trainer.parallel.sequence_parallel must be true for experts with tp > 1"
    ]
    assert not any(f.remedy for f in doctor._layout(config, ["trainer.parallel.sequence_parallel=true"]))


def test_the_doctor_says_what_is_wrong_with_a_config_that_cannot_be_read(tmp_path):
    (tmp_path / "run.yaml").write_text("model: nowhere\n")
    (finding,) = doctor._layout(tmp_path / "run.yaml", [])
    assert finding.is_needed and "nowhere does not exist" in finding.remedy
