"""The policy as a Megatron model: built and loaded by mcore-bridge, run packed, with the head on trained rows only.

Legend: T packed tokens, R trained rows, H hidden size, V vocabulary rows of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import megatron_patches
from slime_cua.config.trainer import TrainerConfig
from slime_cua.convert import ExpertLayout, TensorInfo, expert_layout, read_config
from slime_cua.kernels.linear_logprob import linear_logprob
from slime_cua.trainer.attention_check import settle_packed_attention
from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.context import rows_of_all, share_of
from slime_cua.trainer.lora import Adapters
from slime_cua.trainer.routing import Routing
from slime_cua.trainer.vision import VisionTower
from slime_cua.trainer.vision_attention import ATTENTION_NAME, register_vision_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KEPT_FLOAT32 = (".A_log", ".dt_bias")
"""Ends of the names of gated delta net's decay parameters, which a bf16 model holds in float32 where its folder does."""


class PolicyModel:
    """A Megatron model of a Hugging Face folder. Call inside megatron_patches.cpu_scope()."""

    def __init__(
        self,
        hf_dir: Path | str,
        config: TrainerConfig,
        tensors: dict[str, TensorInfo],
        is_empty: bool = False,
    ) -> None:
        """Build and load. tensors: what slime_cua.convert.check_hf_folder gave; nothing here is strict.

        is_empty: no weight is read; the values are whatever the memory holds.
        """
        from mcore_bridge import ModelConfig, hf_to_mcore_config
        from mcore_bridge.model import get_mcore_model
        from transformers import AutoConfig

        hf_config = AutoConfig.from_pretrained(str(hf_dir))
        text_config = getattr(hf_config, "text_config", hf_config)
        self.vocab_size = int(text_config.vocab_size)
        self.config = ModelConfig(
            **{**hf_to_mcore_config(hf_config), **_megatron_options(config, text_config)}
        )
        self.module = get_mcore_model(self.config)[0]
        if torch.cuda.is_available() and config.dtype == "bf16" and not is_empty:
            settle_packed_attention(self.module, DTYPES[config.dtype], torch.device("cuda"))
        _keep_float32(self.module, tensors)
        _keep_expert_layout(self.config.bridge, expert_layout(tensors, read_config(hf_dir)))
        if not is_empty:
            self.load_weights(hf_dir, tensors)
        self.adapters = Adapters(self.module, config.lora) if config.lora.rank else None
        megatron_patches.apply_to_model(self.module, self.config)
        self.routing = Routing(self.module, self.config, self._tp_group(), config.moe.replay_routing)
        self._text = getattr(self.module, "language_model", self.module)
        self._text._forward_output_layer = self._select_rows
        self._rows: torch.Tensor | None = None
        if self.adapters is not None:
            self._text.decoder.register_forward_pre_hook(_reached_by_gradients, with_kwargs=True)
        tower = getattr(getattr(self.module, "visual", None), "visual", None)
        self.vision: VisionTower | None = None
        if tower is not None:
            register_vision_attention()
            tower.config._attn_implementation = ATTENTION_NAME
            tower.requires_grad_(not config.freeze_vision and self.adapters is None)
            is_frozen = config.freeze_vision or self.adapters is not None
            if config.recompute == "full" and not is_frozen:
                tower.gradient_checkpointing_enable({"use_reentrant": False})
            self.vision = VisionTower(tower, self._tp_group(), is_frozen, config.vision_cache_mb << 20)
        self.runner: Any = self.module
        """What a forward calls: the module, or Megatron's DistributedDataParallel around it."""

    def logprobs(
        self, batch: Microbatch, temperature: float, with_entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log-probs, entropies) of the trained rows under softmax(logits / temperature); fp32 [R].

        The one forward path: old log-probs, reference log-probs and training all come from here.
        """
        if self.routing and batch.packed is not None:
            self.routing.set_batch(batch.packed, batch.token_ids_T.device)
        group = self._cp_group()
        share = None if group is None else share_of(batch, group)
        own = batch if share is None else share.batch
        found = linear_logprob(
            self._hidden_rows(own, None if share is None else share.token_L),
            self._head_weight(),
            own.target_R,
            temperature=temperature,
            vocab_size=self.vocab_size,
            tp_group=self._tp_group(),
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )
        if share is None:
            return found
        return rows_of_all(found[0], share, group), rows_of_all(found[1], share, group)

    def load_weights(self, hf_dir: Path | str, tensors: dict[str, TensorInfo]) -> None:
        """Read a folder of the same architecture into the (base) weights. tensors: as of the constructor."""
        bridge = self.config.bridge
        _keep_expert_layout(bridge, expert_layout(tensors, read_config(hf_dir)))
        bridge.load_weights([self.module], str(hf_dir))

    def forget_images(self) -> None:
        """Drop remembered features of the vision tower: its weights are others now."""
        if self.vision is not None:
            self.vision.forget()

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) pairs as in the folder loaded, adapters merged. All ranks must iterate to the end together."""
        with self.adapters.merged() if self.adapters is not None else contextlib.nullcontext():
            for name, tensor in self.config.bridge.export_weights([self.module]):
                if tensor is not None:
                    yield name, tensor.detach()

    def _hidden_rows(self, batch: Microbatch, token_L: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states of batch.row_R. token_L: the tokens that this context-parallel rank has; rows count in them."""
        from megatron.core.packed_seq_params import PackedSeqParams

        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=batch.cu_seqlens,
            cu_seqlens_kv=batch.cu_seqlens,
            max_seqlen_q=batch.max_seqlen,
            max_seqlen_kv=batch.max_seqlen,
        )
        images = (
            {} if batch.patches is None else {"pixel_values": batch.patches, "image_grid_thw": batch.grid_I3}
        )
        self._rows = batch.row_R
        if self.vision is not None:
            self.vision.batch = batch
        try:
            rows_1RH = self.runner(
                input_ids=self._ids(batch, token_L)[None],
                position_ids=self._positions(batch, token_L),
                attention_mask=None,
                packed_seq_params=packed,
                **images,
            )
        finally:
            self._rows = None
            if self.vision is not None:
                self.vision.batch = None
        return rows_1RH[0]

    def _ids(self, batch: Microbatch, token_L: torch.Tensor | None) -> torch.Tensor:
        """The bridge's models with vision take the whole stream and cut its embeddings; text models take what a rank has."""
        return (
            batch.token_ids_T if token_L is None or self.config.is_multimodal else batch.token_ids_T[token_L]
        )

    def _positions(self, batch: Microbatch, token_L: torch.Tensor | None) -> torch.Tensor:
        positions_3L = batch.positions_3T if token_L is None else batch.positions_3T[:, token_L]
        if self.config.position_embedding_type == "mrope":
            return positions_3L[:, None]
        return positions_3L[:1]

    def _select_rows(self, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
        """In place of the output layer: the hidden states of the trained rows, [R, 1, H]."""
        if self.config.sequence_parallel and self.config.tensor_model_parallel_size > 1:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # linear_logprob gives every rank the whole gradient, so the backward of this gather only slices.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False
            )
        assert self._rows is not None
        return hidden_states[:, 0].index_select(0, self._rows)[:, None]

    def _head_weight(self) -> torch.Tensor:
        if self._text.share_embeddings_and_output_weights:
            return self._text.shared_embedding_or_output_weight()
        return self._text.output_layer.weight

    def _tp_group(self) -> Any:
        from megatron.core import mpu

        return mpu.get_tensor_model_parallel_group() if self.config.tensor_model_parallel_size > 1 else None

    def _cp_group(self) -> Any:
        from megatron.core import mpu

        return mpu.get_context_parallel_group() if self.config.context_parallel_size > 1 else None


def _reached_by_gradients(
    decoder: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Nothing before the adapters is trained, and recomputed layers pass gradients only if their input asks for one."""
    hidden = options["hidden_states"]
    if torch.is_grad_enabled() and not hidden.requires_grad:
        options = {**options, "hidden_states": hidden.detach().requires_grad_()}
    return args, options


def _keep_expert_layout(bridge: Any, layout: ExpertLayout) -> None:
    """Experts go out as they came in. The bridge decides by the model's name; the same architecture is stored in several ways."""
    if layout != "none":
        bridge._get_hf_experts_attr = lambda is_mtp=False: (layout != "split", layout != "split")
        bridge._get_need_transpose = lambda: layout == "in_out"


def _keep_float32(module: torch.nn.Module, tensors: dict[str, TensorInfo]) -> None:
    """Decay parameters of gated delta net stay float32 where the checkpoint has them so; bfloat16 would round them."""
    for leaf in KEPT_FLOAT32:
        if any(info.dtype == "F32" for name, info in tensors.items() if name.endswith(leaf)):
            for name, parameter in module.named_parameters():
                if name.endswith(leaf):
                    parameter.data = parameter.data.float()


def _megatron_options(config: TrainerConfig, text_config: Any) -> dict[str, Any]:
    """What the Hugging Face config does not say: layout, precision, recompute, and fusions."""
    parallel = config.parallel
    options: dict[str, Any] = {
        "tensor_model_parallel_size": parallel.tp,
        "sequence_parallel": parallel.sequence_parallel and parallel.tp > 1,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "params_dtype": DTYPES[config.dtype],
        "bf16": config.dtype == "bf16",
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        # Keeps a third less of a feed-forward layer and makes one pass over it; compiled, so for CUDA only.
        "bias_activation_fusion": torch.cuda.is_available(),
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    if getattr(text_config, "num_experts", None) or getattr(text_config, "num_local_experts", None):
        options["moe_router_load_balancing_type"] = config.moe.balance
        options["moe_aux_loss_coeff"] = config.moe.aux_loss_coef if config.moe.balance == "aux_loss" else 0.0
    if parallel.ep > 1:
        options["expert_tensor_parallel_size"] = 1
    layers = getattr(text_config, "layer_types", None)
    if layers and hasattr(text_config, "linear_num_key_heads"):
        # The bridge reads full_attention_interval only; layer_types says more.
        options["linear_attention_freq"] = f"[{','.join(str(int(x == 'linear_attention')) for x in layers)}]"
    if config.recompute == "full":
        options.update(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    elif config.recompute == "selective":
        options.update(recompute_granularity="selective")
    return options
