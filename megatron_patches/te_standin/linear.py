"""Tensor-parallel linear layers in plain torch, with Transformer Engine's parameter names and attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import Parameter

from megatron_patches.te_standin.norm import make_norm_parameters, normalize


class TransformerEngineBaseModule(torch.nn.Module):
    """What megatron-core asks of any Transformer Engine module: fp8 fields that say off, an empty extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "recipe": None}
        self.save_original_input = False

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...

    def backward_dw(self) -> None: ...

    def need_backward_dw(self) -> bool:
        return False


class _ParallelLinear(TransformerEngineBaseModule):
    """Shared by Linear, LayerNormLinear and GroupedLinear. `sequence_parallel` is read at every forward."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        tp_group: Any,
        tp_size: int,
        bias: bool,
        return_bias: bool,
        parallel_mode: str | None,
        get_rng_state_tracker: Callable[[], Any] | None,
        rng_tracker_name: str | None,
        init_method: Callable[[torch.Tensor], Any] | None,
        params_dtype: torch.dtype | None,
        device: Any,
    ) -> None:
        super().__init__()
        if parallel_mode not in (None, "column", "row"):
            raise ValueError(f"parallel_mode {parallel_mode!r} must be None, 'column' or 'row'")
        split = out_features if parallel_mode == "column" else in_features
        if parallel_mode is not None and split % tp_size:
            raise ValueError(
                f"{parallel_mode} linear of {split} features does not divide over tp_size {tp_size}"
            )
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias = bias and not return_bias
        self._rng = (get_rng_state_tracker, rng_tracker_name)
        self._init_method = init_method
        self._factory: dict[str, Any] = {"dtype": params_dtype, "device": device}

    def _add_parameters(self, weight_name: str, bias_name: str) -> None:
        weight = Parameter(torch.empty(self.out_features, self.in_features, **self._factory))
        self.register_parameter(weight_name, weight)
        if self._init_method is not None and not weight.is_meta:
            tracker, name = self._rng
            scope = tracker().fork(*([name] if name else [])) if tracker else contextlib.nullcontext()
            with scope, torch.no_grad():
                self._init_method(weight)
        _mark_split(weight, 1 if self.parallel_mode == "row" else 0)
        if not self.use_bias:
            setattr(self, bias_name, torch.empty(0, **self._factory))
            return
        bias = Parameter(torch.zeros(self.out_features, **self._factory))
        self.register_parameter(bias_name, bias)
        if self.parallel_mode == "column":
            _mark_split(bias, 0)
        elif self.parallel_mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def _gather_input(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=True, group=self.tp_group
            )
        return mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def _reduce_output(self, y: torch.Tensor) -> torch.Tensor:
        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)

    def _project(self, x: torch.Tensor) -> Any:
        y = self._reduce_output(F.linear(self._gather_input(x), self.weight))
        if self.apply_bias:
            y = y + self.bias
        return (y, self.bias) if self.return_bias else y


def _mark_split(tensor: torch.Tensor, dim: int) -> None:
    """The attributes by which megatron tells shards from replicas."""
    tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = 1  # type: ignore[attr-defined]


def _common(options: dict[str, Any]) -> dict[str, Any]:
    """The constructor arguments that matter here, with Transformer Engine's defaults; the rest is ignored."""
    defaults: dict[str, Any] = {
        "sequence_parallel": False,
        "tp_group": None,
        "tp_size": 1,
        "bias": True,
        "return_bias": False,
        "parallel_mode": None,
        "get_rng_state_tracker": None,
        "rng_tracker_name": None,
        "init_method": None,
        "params_dtype": None,
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }
    return {key: options.get(key, value) for key, value in defaults.items()}


class Linear(_ParallelLinear):
    """y = x W^T (+ b); weight [out/tp, in] (column) or [out, in/tp] (row)."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **_common(options))
        self._add_parameters("weight", "bias")

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **ignored: Any) -> Any:
        return self._project(x)


class LayerNormLinear(_ParallelLinear):
    """Norm of the local rows, then Linear; parameters layer_norm_weight (and _bias), weight, bias.

    return_layernorm_output (read at every forward): the normalised local rows come last in the answer.
    """

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **_common(options))
        self.eps = options.get("eps", 1e-5)
        self.normalization = options.get("normalization", "LayerNorm")
        self.zero_centered_gamma = options.get("zero_centered_gamma", False)
        self.return_layernorm_output = options.get("return_layernorm_output", False)
        self.layer_norm_weight, self.layer_norm_bias = make_norm_parameters(
            in_features, self.normalization, self.zero_centered_gamma, self.sequence_parallel, self._factory
        )
        self._add_parameters("weight", "bias")

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None, **ignored: Any) -> Any:
        normed = normalize(
            x, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        )
        y = self._project(normed)
        if not self.return_layernorm_output:
            return y
        return (*y, normed) if self.return_bias else (y, normed)


class GroupedLinear(_ParallelLinear):
    """One linear per expert: rows 0..m_splits[0] through weight0, the next m_splits[1] through weight1, ..."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **_common(options))
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            self._add_parameters(f"weight{index}", f"bias{index}")

    def forward(self, x: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        parts = torch.split(x, [int(rows) for rows in m_splits], dim=0)
        outputs = [
            F.linear(
                part, getattr(self, f"weight{i}"), getattr(self, f"bias{i}") if self.apply_bias else None
            )
            for i, part in enumerate(parts)
        ]
        y = torch.cat(outputs, dim=0)
        return (y, [getattr(self, f"bias{i}") for i in range(self.num_gemms)]) if self.return_bias else y
