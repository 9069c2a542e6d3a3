"""Bodies of the requests that the embedded engine answers: the part of SGLang's HTTP contract that this project uses.

Unknown keys are errors: a parameter that would be ignored here and obeyed by SGLang must not pass unseen.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rollout.embedded.request import Sampling


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SamplingParams(_Body):
    """SGLang's sampling parameters. Penalties must be neutral: they would change what is sampled from."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: Literal[0] | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    sampling_seed: int | None = None
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    repetition_penalty: Literal[1] = 1
    min_new_tokens: Literal[0] = 0

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value or []

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _none_is_empty(cls, value: Any) -> Any:
        return value or []

    @property
    def is_cut(self) -> bool:
        """Sampled from something else than softmax(logits / temperature)."""
        return self.top_p < 1 or self.top_k > 0 or self.temperature == 0

    def checked(self, room_tokens: int) -> Sampling:
        """For the engine, with at most `room_tokens` new ones."""
        seed = random.getrandbits(63) if self.sampling_seed is None else self.sampling_seed
        return Sampling(
            temperature=self.temperature,
            max_new_tokens=min(self.max_new_tokens, room_tokens),
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(text for text in self.stop if text),
            stop_token_ids=frozenset(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=seed,
        )


class GenerateBody(_Body):
    input_ids: list[int] = Field(min_length=1)
    image_data: list[str] | None = None
    """Base64 or data URIs, one an image placeholder in `input_ids`."""
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: Literal[-1] = -1
    top_logprobs_num: Literal[0] = 0
    return_text_in_logprobs: bool = False
    return_routed_experts: bool = False
    stream: Literal[False] = False
    rid: str | None = None
    routing_key: str | None = None
    """Read by routers only."""

    @field_validator("image_data", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class AbortBody(_Body):
    rid: str = ""
    abort_all: bool = False


class PauseBody(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class EmptyBody(_Body):
    """Nothing."""


class GroupBody(_Body):
    master_address: str
    master_port: int
    rank_offset: int = Field(ge=1)
    world_size: int = Field(ge=2)
    group_name: str = "weight_update_group"
    backend: Literal["gloo", "nccl"] = "nccl"


class DestroyGroupBody(_Body):
    group_name: str = "weight_update_group"


class DistributedBody(_Body):
    names: list[str] = Field(min_length=1)
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class DiskBody(_Body):
    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class VersionBody(_Body):
    new_version: str
    abort_all_requests: bool = True


class CheckerBody(_Body):
    action: Literal["checksum"] = "checksum"


class WeightByNameBody(_Body):
    name: str
    truncate_size: int = Field(100, ge=1)
