"""A teacher as a policy: it answers with the text of the next scripted action, so demonstrations run in the same episode loop."""

from __future__ import annotations

from collections.abc import Callable

from slime_cua.core.actions import Action
from slime_cua.sft.teacher import ScriptedTeacher

DEMONSTRATED_VERSION = 0


class TeacherPolicy:
    """Answers turn n with the teacher's action n. One instance an episode.

    encode: action -> token ids with the end of turn, e.g. renderer.answer_ids(format_action(action)).
    """

    def __init__(self, teacher: ScriptedTeacher, encode: Callable[[Action], tuple[int, ...]]) -> None:
        self._teacher, self._encode, self._turn = teacher, encode, 0

    def answer(self) -> tuple[int, ...]:
        """Token ids of the next action."""
        ids = self._encode(self._teacher.next(None, self._turn))
        self._turn += 1
        return ids
