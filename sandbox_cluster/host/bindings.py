"""Leases on this host: which desktop is whose, and what may still be done with it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sandbox_cluster.api import BindReply, BindRequest, ExecuteReply, ExecuteRequest, StepReply, StepRequest
from sandbox_cluster.errors import ApiError
from sandbox_cluster.host.pool import Pool, Watched
from sandbox_cluster.providers.base import Capture
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.serving import event
from slime_cua.core.errors import SandboxError, UnknownOutcomeError

KEEP_ENDED = 4096

R = TypeVar("R")


@dataclass
class Binding:
    """A lease and its desktop."""

    lease_id: str
    request: BindRequest
    ready: asyncio.Task[Watched]
    action_ids: set[str] = field(default_factory=set)
    """Of this and all earlier desktops of the lease."""
    earlier_ids: set[str] = field(default_factory=set)
    """Of desktops before the last reset: never run again."""

    @property
    def has_desktop(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None


class Bindings:
    """Leases by id. `lost` has those whose desktop failed, until the gateway has heard of it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.on_change: Callable[[], None] = lambda: None
        self._by_id: dict[str, Binding] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.lost: dict[str, str] = {}
        self._end_event = asyncio.Event()
        self.is_closed = False
        """The host stops: no new lease, the old ones go on."""

    def next_end(self) -> asyncio.Task[object]:
        """Done when the next lease ends."""
        self._end_event = asyncio.Event()
        return asyncio.ensure_future(self._end_event.wait())

    @property
    def lease_ids(self) -> tuple[str, ...]:
        return tuple(self._by_id)

    async def bind(self, lease_id: str, request: BindRequest) -> BindReply:
        """A desktop for the lease, the same when asked again. Raises ApiError `gone` (ended here), `unavailable`."""
        if lease_id in self._ended:
            raise ApiError("gone", f"lease {lease_id} has ended here: {self._ended[lease_id]}")
        binding = self._by_id.get(lease_id)
        if binding is None and self.is_closed:
            raise ApiError("unavailable", "this host stops and takes no new lease")
        if binding is None:
            binding = Binding(lease_id, request, asyncio.ensure_future(self._pool.take(request.wait_s)))
            self._by_id[lease_id] = binding
        try:
            watched = await asyncio.shield(binding.ready)
        except asyncio.CancelledError:
            if binding.ready.cancelled():
                raise ApiError("gone", f"lease {lease_id} ended while a desktop was looked for") from None
            raise
        except ApiError:
            self._by_id.pop(lease_id, None)
            raise
        desktop = watched.desktop
        return BindReply(
            desktop_id=f"{desktop.provider_name}-{desktop.slot}",
            provider=desktop.provider_name,
            os=desktop.platform.name,
            screen_wh_px=desktop.screen_wh_px,
            clock_skew_s=desktop.clock_skew_s,
        )

    def unbind(self, lease_id: str, reason: str = "released") -> None:
        """The lease is over: its desktop is ended. A later bind of the same id is refused."""
        self._ended[lease_id] = reason
        self._end_event.set()
        while len(self._ended) > KEEP_ENDED:
            self._ended.popitem(last=False)
        binding = self._by_id.pop(lease_id, None)
        if binding is None:
            return
        if binding.has_desktop:
            self._pool.give_back(binding.ready.result())
        else:
            binding.ready.cancel()

    def lose(self, lease_id: str, reason: str) -> None:
        """Its desktop failed: end it and tell the gateway with the next beat."""
        if lease_id in self._by_id:
            event("desktop_lost", lease=lease_id, reason=reason)
            self.unbind(lease_id, reason)
            self.lost[lease_id] = reason
            self.on_change()

    def check(self) -> None:
        """Lose the leases whose desktop died or fell silent."""
        for lease_id, binding in list(self._by_id.items()):
            if binding.has_desktop and binding.ready.result().is_unhealthy:
                self.lose(lease_id, "the desktop died or did not answer repeated looks")

    def get(self, lease_id: str) -> tuple[Binding, Watched]:
        """Raises ApiError `gone` or `not_found`."""
        if lease_id in self._ended:
            raise ApiError("gone", f"lease {lease_id} has ended: {self._ended[lease_id]}")
        binding = self._by_id.get(lease_id)
        if binding is None or not binding.has_desktop:
            raise ApiError("not_found", f"this host has no lease {lease_id}")
        return binding, binding.ready.result()

    async def reset(self, lease_id: str, wait_s: float) -> BindReply:
        """A fresh desktop under the same lease; the old one is ended first. Earlier action ids stay used."""
        binding, watched = self.get(lease_id)
        binding.earlier_ids |= binding.action_ids
        self._pool.give_back(watched)
        binding.ready = asyncio.ensure_future(self._pool.take(wait_s))
        try:
            return await self.bind(lease_id, binding.request)
        except ApiError as error:
            self._ended[lease_id] = str(error)
            self.lost[lease_id] = f"no fresh desktop at reset: {error}"
            raise

    async def step(self, lease_id: str, request: StepRequest, timeout_s: float) -> StepReply:
        """Play, settle, capture. Raises UnknownOutcomeError when the deadline passes; the desktop is ended then."""

        async def act(desktop: Desktop) -> Capture:
            return await desktop.step(request)

        return (await self._act(lease_id, request.action_id, act, timeout_s)).to_reply()

    async def execute(self, lease_id: str, request: ExecuteRequest, timeout_s: float) -> ExecuteReply:
        async def act(desktop: Desktop) -> ExecuteReply:
            return await desktop.execute(request)

        return await self._act(lease_id, request.action_id, act, timeout_s)

    async def _act(
        self, lease_id: str, action_id: str, act: Callable[[Desktop], Awaitable[R]], timeout_s: float
    ) -> R:
        binding, watched = self.get(lease_id)
        if action_id in binding.earlier_ids:
            raise ApiError(
                "conflict", f"action {action_id!r} ran before the reset; it is not run again: take a fresh id"
            )
        binding.action_ids.add(action_id)
        try:
            with watched.busy():
                async with asyncio.timeout(timeout_s):
                    return await act(watched.desktop)
        except TimeoutError:
            self._lose_if(binding, watched, f"action {action_id} did not end within {timeout_s:.1f} s")
            raise UnknownOutcomeError(
                f"the desktop did not answer within {timeout_s:.1f} s: action {action_id!r} may have happened; the desktop is ended"
            ) from None
        except SandboxError as error:
            if not isinstance(error, UnknownOutcomeError):
                self._lose_if(binding, watched, str(error))
            raise

    def _lose_if(self, binding: Binding, watched: Watched, reason: str) -> None:
        """Lose the lease, unless a reset has already given it another desktop."""
        if binding.has_desktop and binding.ready.result() is watched:
            self.lose(binding.lease_id, reason)
