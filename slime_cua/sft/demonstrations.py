"""A teacher as a policy: it answers with the text of the next scripted action, so demonstrations run in the same episode loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollout.ports import Sampled
from slime_cua.core.actions import Action
from slime_cua.core.types import ImageRef
from slime_cua.sft.teacher import ScriptedTeacher

DEMONSTRATED_VERSION = 0


class TeacherPolicy:
    """`rollout.ports.PolicyPort` that plays a script. One instance an episode.

    encode: action -> token ids with the end of turn, e.g. renderer.answer_ids(format_action(action)).
    """

    def __init__(self, teacher: ScriptedTeacher, encode: Callable[[Action], tuple[int, ...]]) -> None:
        self._teacher, self._encode, self._turn = teacher, encode, 0

    async def generate(
        self, prompt_ids: Sequence[int], images: Sequence[tuple[ImageRef, bytes]], *, session: str
    ) -> Sampled:
        """The next action; log-probs are 0: nobody sampled it."""
        ids = self._encode(self._teacher.next(None, self._turn))
        self._turn += 1
        return Sampled(ids, (0.0,) * len(ids), (DEMONSTRATED_VERSION,) * len(ids), "stop")
