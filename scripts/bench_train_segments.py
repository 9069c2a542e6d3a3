"""Segments of screenshots that fill a benchmark's micro-batches."""

from __future__ import annotations

import hashlib
import io
from typing import Any

NUM_SCREENS = 10
"""Of a segment: the most that the context keeps."""


class Screens:
    """Distinct screenshots, made once and kept as PNG."""

    def __init__(self, width: int, height: int, number: int) -> None:
        import numpy as np
        from PIL import Image

        from slime_cua.core.types import ImageRef

        self._png: dict[str, bytes] = {}
        self.refs = []
        for index in range(number):
            small = np.random.default_rng(index).integers(0, 255, (26, 47, 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
            name = hashlib.sha256(file.getvalue()).hexdigest()
            self._png[name] = file.getvalue()
            self.refs.append(ImageRef(sha256=name, width_px=width, height_px=height))

    def get(self, ref: Any) -> bytes:
        """PNG bytes."""
        return self._png[ref.sha256]


def make_segments(
    patches: Any, max_tokens: int, num_micro_batches: int, is_tiny: bool
) -> tuple[list[Any], Screens]:
    """(samples, screenshots): segments of ten screenshots of 1504x832, no screenshot in two of them, that fill
    `num_micro_batches` micro-batches of `max_tokens` tokens to the last few.

    Segments of a micro-batch have different lengths (up to a quarter from their mean), and 5 to 10 % of their tokens are trained.
    """
    import numpy as np

    width, height = (96, 64) if is_tiny else (1504, 832)
    rows, columns = patches.token_grid(width, height)
    least = NUM_SCREENS * (rows * columns + 2 + 6)
    each = max(1, max_tokens // (least + least // 8))
    lengths: list[int] = []
    rng = np.random.default_rng(0)
    for _ in range(num_micro_batches):
        left = max_tokens
        for place in range(each):
            mean = left // (each - place)
            room = min(mean - least, mean // 4)
            share = mean if place == each - 1 else mean - int(rng.integers(0, max(1, room)))
            lengths.append(share)
            left -= share
    screens = Screens(width, height, NUM_SCREENS * len(lengths))
    shares = np.linspace(0.05, 0.10, max(2, len(lengths)))
    samples = [
        _sample(
            index,
            length,
            float(shares[index]),
            rows * columns,
            screens.refs[NUM_SCREENS * index : NUM_SCREENS * (index + 1)],
        )
        for index, length in enumerate(lengths)
    ]
    return samples, screens


def _sample(index: int, length: int, trained_share: float, image_tokens: int, shown: list[Any]) -> Any:
    """One of `length` tokens with its images expanded."""
    import numpy as np

    from slime_cua.core.types import Segment, TrainSample

    rng = np.random.default_rng(index)
    trained = max(2, round(trained_share * length / NUM_SCREENS))
    ids: list[int] = []
    steps: list[int] = []
    for turn in range(NUM_SCREENS):
        # Ids after this turn: its share of the tokens, where each image shown so far is one id yet.
        end = length * (turn + 1) // NUM_SCREENS - (turn + 1) * (image_tokens - 1)
        num_text = end - len(ids) - 3 - trained
        context = [3, 6, 4, *rng.integers(20, 300, max(0, num_text)).tolist()]
        ids += context + rng.integers(20, 300, trained).tolist()
        steps += [-1] * len(context) + [turn] * trained
    segment = Segment(
        segment_id=f"s{index:04d}",
        episode_id="e",
        group_id="g",
        task_id="t",
        token_ids=tuple(ids),
        is_trained=tuple(s >= 0 for s in steps),
        logp=(0.0,) * len(ids),
        versions=tuple(0 if s >= 0 else -1 for s in steps),
        step_of_token=tuple(steps),
        step_types=("gui",) * NUM_SCREENS,
        images=tuple(shown),
    )
    return TrainSample(segment=segment, advantage=1.0)
