"""Router replay against transformers with the same forced experts; the step-0 gap with and without; the balancing loss."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from slime_cua.config.trainer import MoeConfig, OptimizerConfig, TrainerConfig
from slime_cua.core.errors import DataError
from slime_cua.core.routing import RoutedExperts
from slime_cua.core.types import TrainSample
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders
from slime_cua.trainer.rank import TrainerRank
from tests.numerics.hf_reference import reference
from tests.numerics.test_trainer_layouts import worst_gradient
from tests.numerics.tiny_models import IMAGE_TOKEN, MOE, make_qwen35_moe, store_experts
from tests.numerics.trainer_cases import MemoryStore, make_samples
from tests.numerics.trainer_matrix import gradients

NUM_LAYERS, TOP_K, NUM_EXPERTS = 4, MOE["num_experts_per_tok"], MOE["num_experts"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_experts(make_qwen35_moe(tmp_path_factory.mktemp("replay") / "model"), "out_in")


@pytest.fixture(scope="module")
def cases() -> tuple[list[TrainSample], MemoryStore]:
    return make_samples()


def with_record(sample: TrainSample, experts_NLK: np.ndarray, logp: list[float] | None = None) -> TrainSample:
    update: dict[str, Any] = {"routed_experts": RoutedExperts.from_array(experts_NLK)}
    if logp is not None:
        values = iter(logp)
        update["logp"] = tuple(next(values) if t else 0.0 for t in sample.segment.is_trained)
    return sample.model_copy(update={"segment": sample.segment.model_copy(update=update)})


def start(folder: Path, **moe: Any) -> TrainerRank:
    trainer = TrainerRank(
        TrainerConfig(
            dtype="fp32",
            max_tokens_per_rank=512,
            freeze_vision=False,
            optimizer=OptimizerConfig(lr=1e-3),
            moe=MoeConfig(**moe),
        )
    )
    trainer.load(folder)
    return trainer


@pytest.fixture
def force_experts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make transformers' routers use given experts: calls come layer by layer, sample by sample."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

    def force(records: list[np.ndarray]) -> None:
        calls = itertools.count()

        def forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            number = next(calls)
            logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
            probs = logits.float().softmax(-1)
            own = probs.topk(self.top_k).indices
            known = torch.from_numpy(records[number // NUM_LAYERS][:, number % NUM_LAYERS].astype(np.int64))
            chosen = torch.cat([known, own[len(known) :]])
            values = probs.gather(1, chosen)
            return logits, values / values.sum(-1, keepdim=True), chosen

        monkeypatch.setattr(Qwen3_5MoeTopKRouter, "forward", forward)

    return force


def lengths(folder: Path, samples: list[TrainSample]) -> list[int]:
    config = ImageProcessorConfig.from_hf(folder)
    return [len(expand_image_placeholders(s.segment.token_ids, s.segment.images, config)) for s in samples]


def test_replayed_experts_give_the_logprobs_and_gradients_of_transformers_with_the_same_experts(
    folder: Path, cases: tuple[list[TrainSample], MemoryStore], force_experts: Any
) -> None:
    """Random experts, so nothing is right by chance; the last token of each segment is left to the router."""
    samples, store = cases
    rng = np.random.default_rng(3)
    records = [
        np.argsort(rng.random((n - 1, NUM_LAYERS, NUM_EXPERTS)), axis=-1)[..., :TOP_K]
        for n in lengths(folder, samples)
    ]
    force_experts(records)
    expected = reference(folder, samples, store)
    recorded = [with_record(s, r) for s, r in zip(samples, records, strict=True)]
    trainer = start(folder)
    found = trainer.logprobs(recorded, store)
    grads = gradients(trainer, recorded, store)
    plain = trainer.logprobs(samples, store)
    trainer.close()
    for got, wanted in zip(found, expected["logp"], strict=True):
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=1e-4, rtol=0)
    assert (
        max(abs(a - b) for p, f in zip(plain, found, strict=True) for a, b in zip(p, f, strict=True)) > 0.05
    )
    error, name = worst_gradient(grads["grads"], expected["grads"])
    assert error < 3e-3, f"{name}: {error:.1e}"
    gate = "model.language_model.layers.3.mlp.gate.weight"
    assert float(expected["grads"][gate].abs().max()) > 1e-4
    assert worst_gradient(grads["grads"], {gate: expected["grads"][gate]})[0] < 1e-3


def engine_in_bf16(
    folder: Path, samples: list[TrainSample], store: MemoryStore
) -> Iterator[tuple[list[float], np.ndarray]]:
    """Log-probs of trained tokens and chosen experts, by transformers in bfloat16: the engine of this test."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    chosen: list[torch.Tensor] = []
    for layer in model.model.language_model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, i, out: chosen.append(out[2]))
    config, processor = ImageProcessorConfig.from_hf(folder), Qwen2VLImageProcessorPil.from_pretrained(folder)
    for sample in samples:
        segment = sample.segment
        ids = torch.tensor([expand_image_placeholders(segment.token_ids, segment.images, config)])
        inputs: dict[str, Any] = {}
        if segment.images:
            images = [Image.open(io.BytesIO(store.get(ref))) for ref in segment.images]
            inputs = dict(processor(images, return_tensors="pt"))
            inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
        chosen.clear()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False, **inputs).logits[0].float()
        logp = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        is_trained = []
        images_left = iter(segment.images)
        for token, trained in zip(segment.token_ids, segment.is_trained, strict=True):
            is_image = token == config.image_token_id
            count = len(expand_image_placeholders([token], [next(images_left)], config)) if is_image else 1
            is_trained += [trained] * count
        yield logp[torch.tensor(is_trained[1:])].tolist(), torch.stack(chosen, 1)[:-1].numpy()


def test_replay_makes_the_gap_between_engine_and_trainer_smaller_at_step_0(
    folder: Path, cases: tuple[list[TrainSample], MemoryStore]
) -> None:
    samples, store = cases
    answers = list(engine_in_bf16(folder, samples, store))
    recorded = [with_record(s, experts, logp) for s, (logp, experts) in zip(samples, answers, strict=True)]
    metrics = {}
    for replay in (True, False):
        trainer = start(folder, replay_routing=replay)
        metrics[replay] = trainer.train_step(recorded, store, "gspo", policy_version=0)
        trainer.close()
    with_replay, without = metrics[True], metrics[False]
    assert with_replay["moe/replay_agreement"] < 1, "no near tie fell differently: the test shows nothing"
    assert with_replay["gap/logp_abs_mean"] < without["gap/logp_abs_mean"]
    tokens = lengths(folder, samples)
    assert with_replay["moe/replayed_share"] == pytest.approx(1 - len(tokens) / sum(tokens), abs=1e-9)
    assert without["moe/replayed_share"] == 0
    counts = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    for _, experts in answers:
        for layer in range(NUM_LAYERS):
            counts[layer] += np.bincount(experts[:, layer].ravel(), minlength=NUM_EXPERTS)
    busiest = (counts.max(1) * NUM_EXPERTS / counts.sum(1)).mean()
    assert with_replay["moe/load_max"] == pytest.approx(
        busiest, rel=0.05
    )  # each segment's last token is not recorded


def test_experts_of_another_model_are_refused(
    folder: Path, cases: tuple[list[TrainSample], MemoryStore]
) -> None:
    samples, store = cases
    trainer = start(folder)
    for shape, high in (((4, NUM_LAYERS + 1, TOP_K), 1), ((4, NUM_LAYERS, TOP_K), NUM_EXPERTS)):
        bad = with_record(samples[0], np.full(shape, high))
        with pytest.raises(DataError, match="the engine runs another model"):
            trainer.logprobs([bad], store)
    trainer.close()


def test_the_balancing_loss_has_the_gradient_of_its_formula(
    folder: Path, cases: tuple[list[TrainSample], MemoryStore]
) -> None:
    """L = coef E / (K T^2) sum_e n_e sum_t p_te, n_e tokens of expert e. In the last layer's router only the direct part."""
    samples, store = cases
    texts = [sample for sample in samples if not sample.segment.images]
    num_tokens = sum(lengths(folder, texts))
    gate = f"model.language_model.layers.{NUM_LAYERS - 1}.mlp.gate.weight"
    found = {}
    for coef in (0.0, 0.5):
        trainer = start(folder, balance="aux_loss" if coef else "none", aux_loss_coef=coef)
        router = trainer.model._text.decoder.layers[-1].mlp.router
        inputs: list[torch.Tensor] = []
        router.register_forward_pre_hook(lambda m, args, kept=inputs: kept.append(args[0].detach()))
        trainer.model.module.train()
        trainer.model.routing.begin_step(num_tokens)
        found[coef] = gradients(trainer, texts, store)["grads"][gate]
        trainer.close()
    (hidden,) = inputs
    from safetensors.torch import load_file

    weight = load_file(folder / "model.safetensors")[gate].float().requires_grad_()
    probs = (hidden.reshape(-1, hidden.shape[-1]) @ weight.T).softmax(-1)
    counts = torch.bincount(probs.topk(TOP_K).indices.flatten(), minlength=NUM_EXPERTS)
    loss = 0.5 * NUM_EXPERTS / (TOP_K * num_tokens**2) * (counts * probs.sum(0)).sum()
    loss.backward()
    assert weight.grad is not None
    torch.testing.assert_close(found[0.5] - found[0.0], weight.grad, atol=2e-6, rtol=1e-3)
