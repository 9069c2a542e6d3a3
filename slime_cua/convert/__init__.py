"""Hugging Face folders in and out, strictly."""

from slime_cua.convert.expected import PASSED_PREFIXES, check_hf_folder, expected_shapes
from slime_cua.convert.expert_layout import ExpertLayout, expert_layout, routing_shape
from slime_cua.convert.hf_folder import TensorInfo, copy_companions, read_config, tensor_table

__all__ = [
    "PASSED_PREFIXES",
    "ExpertLayout",
    "TensorInfo",
    "check_hf_folder",
    "copy_companions",
    "expected_shapes",
    "expert_layout",
    "read_config",
    "routing_shape",
    "tensor_table",
]
