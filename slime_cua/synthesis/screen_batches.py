"""Batches of generated screens on the training device, and a small held-out set to watch pointing by.

Legend: T packed tokens, R trained rows, C coordinates that may be answered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from slime_cua.synthesis.feed import Feed
from slime_cua.synthesis.pretrain_data import Batch, Encoder
from slime_cua.synthesis.questions import Question
from slime_cua.synthesis.screens import SCREEN_WH_PX, Screen
from slime_cua.synthesis.starter import vocabulary
from slime_cua.trainer.batch import Microbatch
from slime_cua.trainer.images import PatchConfig, patchify
from slime_cua.trainer.streams import expand_streams


def pin(feed: Feed) -> bool:
    """Page-lock the feed's memory, so that copies to the GPU run beside the computation; False if that is refused."""
    address = np.frombuffer(feed.memory, np.uint8).ctypes.data
    try:
        return int(torch.cuda.cudart().cudaHostRegister(address, len(feed.memory), 0)) == 0
    except RuntimeError:
        return False


def to_device(batch: Batch, config: PatchConfig, device: torch.device) -> tuple[Microbatch, torch.Tensor]:
    """(micro-batch, kind of each trained row [R]) of a batch; copies are queued on the current stream."""
    num_sequences, length = batch.token_ids_BL.shape
    kind_T = batch.kind_BL.reshape(-1)
    at_R = np.flatnonzero(kind_T >= 0)
    rows = np.stack([at_R - 1, batch.token_ids_BL.reshape(-1)[at_R], kind_T[at_R]]).astype(np.int64)
    row_R, target_R, kind_R = _move(rows, device)
    microbatch = _microbatch(
        token_ids_T=_move(batch.token_ids_BL, device).long().flatten(),
        positions_3T=_move(batch.positions_3BL, device).long().flatten(1),
        row_R=row_R,
        target_R=target_R,
        num_sequences=num_sequences,
        length=length,
        pixels=_move(batch.pixels, device),
        config=config,
    )
    return microbatch, kind_R


def _move(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)


def _microbatch(
    token_ids_T: torch.Tensor,
    positions_3T: torch.Tensor,
    row_R: torch.Tensor,
    target_R: torch.Tensor,
    num_sequences: int,
    length: int,
    pixels: torch.Tensor,
    config: PatchConfig,
) -> Microbatch:
    """Sequences of equal length, images in their order."""
    device = token_ids_T.device
    rows, columns = config.grid_hw(*SCREEN_WH_PX)
    return Microbatch(
        token_ids_T=token_ids_T,
        positions_3T=positions_3T,
        cu_seqlens=torch.arange(0, (num_sequences + 1) * length, length, dtype=torch.int32, device=device),
        max_seqlen=length,
        row_R=row_R,
        target_R=target_R,
        patches=patchify(pixels, config),
        grid_I3=torch.tensor([[1, rows, columns]], device=device).expand(len(pixels), 3).contiguous(),
    )


class HeldOut:
    """Pointing questions, one a sequence, whose hit rate is read off the log-probs of all coordinates.

    x is the likeliest coordinate after the question, y the likeliest after the right x and a blank. is_chat: asked in a chat
    turn before the screen.
    """

    def __init__(
        self,
        asked: list[tuple[Screen, Question]],
        is_chat: bool,
        encoder: Encoder,
        config: PatchConfig,
        device: torch.device,
    ) -> None:
        values = [str(v) for v in range(0, 1001, vocabulary.GRID_STEP)]
        self._values_C = np.array([int(v) for v in values])
        self._questions = [question for _, question in asked]
        coordinate_C = torch.tensor([encoder.encode(v)[0] for v in values], device=device)
        streams = [self._stream(question, is_chat, encoder) for question in self._questions]
        length = max(len(ids) for ids, _ in streams)
        end = encoder.encode("\n")[0]
        padded = np.array([ids + [end] * (length - len(ids)) for ids, _ in streams])
        expanded = expand_streams(
            padded.reshape(-1),
            np.full(len(padded), length),
            np.array([encoder.screen_grid] * len(padded)),
            encoder.image[1],
        )
        first = np.array([n * length + at for n, (_, at) in enumerate(streams)])
        row_2R = expanded.start_N[np.stack([first, first + 2])].T.reshape(-1) - 1
        num = len(padded)
        self._batch = _microbatch(
            token_ids_T=_move(expanded.token_ids_T, device),
            positions_3T=_move(expanded.positions_3T, device),
            row_R=_move(row_2R, device).repeat_interleave(len(values)),
            target_R=coordinate_C.repeat(2 * num),
            num_sequences=num,
            length=len(expanded.token_ids_T) // num,
            pixels=_move(np.stack([screen.pixels for screen, _ in asked]), device),
            config=config,
        )

    def _stream(self, question: Question, is_chat: bool, encoder: Encoder) -> tuple[list[int], int]:
        """(ids with one placeholder, index of x among them)."""
        opening = [*encoder.image, *encoder.encode(question.opening())]
        if is_chat:
            request = question.opening().removesuffix(": ")
            opening = [*encoder.encode(f"<|im_start|>user\n{request}"), *encoder.image]
            opening += encoder.encode("<|im_end|>\n<|im_start|>assistant\n")
        return [*opening, *encoder.encode(question.answer + "\n")], len(opening)

    def hit_rate(self, model: Any) -> float:
        """Share of the questions whose answer lies in the box. model: a PolicyModel. A collective."""
        with torch.no_grad():
            logp_R, _ = model.logprobs(self._batch, 1.0)
        best = logp_R.view(len(self._questions), 2, -1).argmax(-1).cpu().numpy()
        points = self._values_C[best]
        hits = [_is_hit(q, int(x), int(y)) for q, (x, y) in zip(self._questions, points, strict=True)]
        return float(np.mean(hits))


def _is_hit(question: Question, x: int, y: int) -> bool:
    from slime_cua.evaluation.pointing import is_right

    return is_right(question, f"{x} {y}")
