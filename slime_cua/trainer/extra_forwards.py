"""Log-probs under other weights than the current ones: the reference policy, and the versions that sampled the tokens.

Legend: R trained rows of a micro-batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from slime_cua.config.algo import LossConfig
from slime_cua.convert import check_hf_folder, expected_shapes
from slime_cua.core.errors import ConfigError, DataError
from slime_cua.data.batch import PackedBatch, PackedStep
from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.model import PolicyModel

REFERENCE = "reference"
MicroBatches = Iterator[tuple[PackedBatch, Microbatch]]


@dataclass(frozen=True)
class ExtraLogprobs:
    """What a loss needs besides the forward that it differentiates, for one micro-batch. None: that forward's own."""

    start_R: torch.Tensor | None = None
    """Under the weights before the collection's first optimiser step."""
    older_R: torch.Tensor | None = None
    """Under the weights of each token's version where is_older_R."""
    is_older_R: torch.Tensor | None = None
    """Tokens of versions before the current one whose weights are kept."""
    ref_R: torch.Tensor | None = None
    """Under the reference policy."""

    def version_logp_R(
        self, logp_R: torch.Tensor, engine_R: torch.Tensor, is_lost_R: torch.Tensor
    ) -> torch.Tensor:
        """For pi_old = behaviour: the current weights' where current, an older version's where kept, else the engine's."""
        found_R = logp_R.detach()
        if self.older_R is not None and self.is_older_R is not None:
            found_R = torch.where(self.is_older_R, self.older_R, found_R)
        return torch.where(is_lost_R, engine_R, found_R)


class WeightCopies:
    """Copies of a model's weights by name, in the host's memory."""

    def __init__(self, model: PolicyModel) -> None:
        self._parameters = dict(model.module.named_parameters())
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._copies

    def keep(self, name: str) -> None:
        """Copy the current weights."""
        self._copies[name] = self._current()

    def drop_all_but(self, names: Iterable[str]) -> None:
        """Forget the others."""
        kept = set(names)
        self._copies = {name: copy for name, copy in self._copies.items() if name in kept}

    def names(self) -> tuple[str, ...]:
        """What is kept."""
        return tuple(self._copies)

    def get(self, name: str) -> dict[str, torch.Tensor]:
        """A copy, by parameter."""
        return self._copies[name]

    def put(self, name: str, copy: dict[str, torch.Tensor]) -> None:
        """Keep a copy that `get` gave."""
        self._copies[name] = copy

    @contextlib.contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """Run with the weights `name`; the current ones come back bit for bit, also after an error."""
        with self.restored():
            self._write(self._copies[name])
            yield

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Whatever happens to the weights inside, afterwards they are what they were."""
        current = self._current()
        try:
            yield
        finally:
            self._write(current)

    def _current(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().to("cpu", copy=True) for name, p in self._parameters.items()}

    @torch.no_grad()
    def _write(self, copy: Mapping[str, torch.Tensor]) -> None:
        for name, p in self._parameters.items():
            p.data.copy_(copy[name])


class ExtraForwards:
    """Runs the forwards that a loss section asks for, before the first backward of a step.

    Every rank decides alike: by the whole batch, never by its own share.
    """

    def __init__(self, model: PolicyModel, hf_dir: Path, reference: Path | None = None) -> None:
        """reference: folder of the frozen reference policy; None: `hf_dir`, or the model with adapters off."""
        self._model, self._hf_dir, self._reference = model, hf_dir, reference
        self._copies = WeightCopies(model)

    def needed(self, batch: PackedStep, section: LossConfig, version: int | None) -> list[str]:
        """Names of the weights that this step needs besides the current ones."""
        names = [REFERENCE] if section.kl is not None else []
        if section.pi_old == "behaviour":
            if version is None:
                raise ConfigError(
                    "loss.pi_old = behaviour needs policy_version, the version of the current weights"
                )
            older = sorted(v for v in _versions(batch) if v < version)
            names += [_name(v) for v in older if _name(v) in self._copies]
        return names

    def run(
        self, names: Sequence[str], micro_batches: Callable[[], MicroBatches], temperature: float
    ) -> list[ExtraLogprobs]:
        """One ExtraLogprobs a micro-batch. The first use of the reference reads it from its folder."""
        found: list[tuple[PackedBatch, dict[str, torch.Tensor]]] = []
        self._model.module.eval()
        for name in names:
            with torch.no_grad(), self._weights(name):
                for place, (packed, on_device) in enumerate(micro_batches()):
                    if place == len(found):
                        found.append((packed, {}))
                    found[place][1][name] = self._model.logprobs(on_device, temperature)[0]
        self._model.module.train()
        return [_extra(logprobs, packed) for packed, logprobs in found]

    def keep_version(self, section: LossConfig, version: int | None, max_lag: int) -> None:
        """Before the optimiser moves the weights: they sampled tokens that later batches hold."""
        if section.pi_old != "behaviour" or version is None:
            return
        self._copies.keep(_name(version))
        self._copies.drop_all_but([REFERENCE, *(_name(version - age) for age in range(max_lag + 1))])

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's copies of older versions, for a checkpoint; the reference is read again from its folder."""
        return {name: self._copies.get(name) for name in self._copies.names() if name != REFERENCE}

    def load_state_dict(self, state: Mapping[str, dict[str, torch.Tensor]]) -> None:
        """Take back what `state_dict` gave; other versions are forgotten."""
        self._copies.drop_all_but([REFERENCE])
        for name, copy in state.items():
            self._copies.put(name, copy)

    def is_lost(self, packed: PackedBatch, version: int | None) -> np.ndarray:
        """[R] tokens whose version's weights are gone (sampled under another layout, before a resume)."""
        version_R = packed.version_T[packed.is_trained_T]
        known = [v for v in np.unique(version_R) if v == version or _name(int(v)) in self._copies]
        return ~np.isin(version_R, known)

    @contextlib.contextmanager
    def _weights(self, name: str) -> Iterator[None]:
        if name == REFERENCE and self._reference is None and self._model.adapters is not None:
            with self._model.adapters.off():
                yield
            return
        if name == REFERENCE and REFERENCE not in self._copies:
            self._read_reference()
        with self._copies.in_use(name):
            if name != REFERENCE or self._reference is None:
                yield
                return
            # Another folder may have another vision tower: features of one are not the other's.
            self._model.forget_images()
            try:
                yield
            finally:
                self._model.forget_images()

    def _read_reference(self) -> None:
        folder = self._reference or self._hf_dir
        tensors = check_hf_folder(folder)
        with self._copies.restored():
            self._model.load_weights(folder, tensors)
            self._copies.keep(REFERENCE)


def check_reference(folder: str, hf_dir: Path | str) -> Path | None:
    """The folder of the reference policy, None for "". Raises CheckpointError or ConfigError unless it has the shapes of `hf_dir`."""
    if not folder:
        return None
    check_hf_folder(folder)
    mine, other = expected_shapes(hf_dir), expected_shapes(folder)
    for name in sorted(set(mine) | set(other)):
        if mine.get(name) != other.get(name):
            raise ConfigError(
                f"trainer.reference_model = {folder}: tensor {name} has shape {other.get(name)}, the policy's has "
                f"{mine.get(name)}: give a model of the same architecture and sizes"
            )
    return Path(folder)


def start_logprobs(packed: PackedBatch, by_segment: Mapping[str, Sequence[float]]) -> torch.Tensor:
    """[R] from {segment id: log-prob of each trained token in order}. Raises DataError naming a segment that does not fit."""
    segment_R = packed.segment_id_T[packed.is_trained_T]
    out_R = np.zeros(len(segment_R), dtype=np.float32)
    for position, name in enumerate(packed.segment_names):
        rows = segment_R == position
        values = by_segment.get(name, ())
        if len(values) != rows.sum():
            raise DataError(
                f"segment {name} has {rows.sum()} trained tokens and {len(values)} start log-probs"
            )
        out_R[rows] = values
    return torch.from_numpy(out_R)


def _versions(batch: PackedStep) -> set[int]:
    return {
        int(v)
        for share in batch.micro_batches
        for packed in share
        for v in np.unique(packed.version_T[packed.is_trained_T])
    }


def _extra(found: dict[str, torch.Tensor], packed: PackedBatch) -> ExtraLogprobs:
    ref_R = found.pop(REFERENCE, None)
    if not found:
        return ExtraLogprobs(ref_R=ref_R)
    like = next(iter(found.values()))
    version_R = torch.from_numpy(packed.version_T[packed.is_trained_T]).to(like.device)
    older_R, is_older_R = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.bool)
    for name, logp_R in found.items():
        is_this_R = version_R == int(name.removeprefix("version "))
        older_R, is_older_R = torch.where(is_this_R, logp_R, older_R), is_older_R | is_this_R
    return ExtraLogprobs(older_R=older_R, is_older_R=is_older_R, ref_R=ref_R)


def _name(version: int) -> str:
    return f"version {version}"
