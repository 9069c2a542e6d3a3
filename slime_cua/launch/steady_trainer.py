"""A trainer that outlives its ranks: when one is lost, all start again and come back to the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slime_cua.launch.faults import FaultLog
from slime_cua.launch.trainer_group import TrainerLost
from slime_cua.trainer.publish_ways import PublishPlan

T = TypeVar("T")
Call = Callable[..., Any]
"""(method of TrainerRank, *arguments, **named) -> rank 0's answer."""


class Group(Protocol):
    """The ranks of one trainer; RayTrainerGroup is one. A lost rank is a TrainerLost."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...
    def publish(self, version: int, urls: Sequence[str], plan: PublishPlan) -> Any: ...
    def close(self) -> None: ...


class SteadyTrainer:
    """Starts groups by `start` and calls them. A call that a lost rank broke off is made again on a new group.

    Before that the new group is brought back to where the old one was by `rebuild`, which whoever trains sets. Each loss
    counts in `faults`, which ends the run with a report when there are too many.
    """

    def __init__(
        self, start: Callable[[], Group], faults: FaultLog, say: Callable[[str], None], logs: Path
    ) -> None:
        self._start, self._faults, self._say, self._logs = start, faults, say, logs
        self.rebuild: Callable[[Call], None] = lambda call: None
        self.num_restarts = 0
        self._group: Group | None = start()

    def come_back(self) -> None:
        """The group that has only started comes to where `rebuild` brings it.

        Not by `call`: a rank lost on the way means a new group that is brought there as a whole, and nothing after it.
        """
        first = self._group

        def work(group: Group) -> None:
            if group is first:
                self.rebuild(group.call)

        self._steadily("coming back", work)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run `method` on every rank; rank 0's result."""
        return self._steadily(method, lambda group: group.call(method, *args, **kwargs))

    def together(self, what: str, work: Callable[[Call], T]) -> T:
        """The calls that `work` makes, as one: a rank lost in any of them means all of them again on the new group."""
        return self._steadily(what, lambda group: work(group.call))

    def publish(self, version: int, urls: Sequence[str], plan: PublishPlan) -> Any:
        """As RayTrainerGroup.publish."""
        return self._steadily("publish", lambda group: group.publish(version, urls, plan))

    def close(self) -> None:
        """End the ranks. May be repeated."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _steadily(self, what: str, work: Callable[[Group], T]) -> T:
        while True:
            try:
                return work(self._group or self._restarted())
            except TrainerLost as error:
                self.close()
                self._say(f"the trainer was lost in {what}: {error}")
                self._faults.record("trainer", f"{what}: {error}", self._logs / "trainer_*.log")

    def _restarted(self) -> Group:
        self.num_restarts += 1
        self._say("starting the trainer again")
        group = self._group = self._start()
        self.rebuild(group.call)
        return group
