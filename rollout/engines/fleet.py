"""The engines of a run: started together, watched, restarted, and only those with the current weights in traffic.

starting -> serving <-> stale (a newer version was published without it)
               |-> restarting -> serving, or stale until weights come

"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from rollout.engines.process import EngineProcess
from slime_cua.config.rollout import EngineConfig
from slime_cua.core.errors import EngineError

log = logging.getLogger(__name__)


class EngineHandle(Protocol):
    """What owns one server: EngineProcess here, an adapter of a remote actor elsewhere."""

    url: str

    @property
    def pid(self) -> int: ...
    def start(self) -> str: ...
    def restart(self) -> str: ...
    def stop(self) -> None: ...
    @property
    def is_running(self) -> bool: ...


@dataclass(frozen=True)
class HealthRule:
    """An engine is restarted when `max_misses` of its last `window` checks failed, or its process is gone."""

    interval_s: float = 2.0
    timeout_s: float = 5.0
    window: int = 5
    max_misses: int = 3


@dataclass
class _Member:
    handle: EngineHandle
    url: str = ""
    version: int = -1
    checks: deque[bool] = field(default_factory=lambda: deque(maxlen=5))
    num_restarts: int = 0
    num_losses: int = 0
    """Restarts of a server that was up; the others are further tries."""
    num_failed_starts: int = 0
    """In a row."""


class EngineFleet:
    """Supervises engines, each from a thread of its own.

    Example: with EngineFleet.local(config, model, run_dir) as fleet: client.set_engines(fleet.serving(), fleet.version)
    After each publish call `published`. `on_change` is called, from a thread of the fleet's, when the serving engines change.
    """

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        *,
        version: int = 0,
        rule: HealthRule | None = None,
        update_timeout_s: float = 600.0,
        on_change: Callable[[tuple[str, ...], int], None] | None = None,
    ) -> None:
        self._rule = rule or HealthRule()
        self._members = [_Member(handle, checks=deque(maxlen=self._rule.window)) for handle in handles]
        self._version = self._start_version = version
        self._weights_folder: Path | None = None
        self._update_timeout_s = update_timeout_s
        self._on_change = on_change
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, args=(member,), name="engine-watch", daemon=True)
            for member in self._members
        ]

    @classmethod
    def local(
        cls,
        config: EngineConfig,
        model: Path,
        run_dir: Path,
        *,
        version: int = 0,
        device: str = "cpu",
        rule: HealthRule | None = None,
        on_change: Callable[[tuple[str, ...], int], None] | None = None,
    ) -> EngineFleet:
        """engine.num_engines servers on this machine; logs in run_dir/engines."""
        handles = [
            EngineProcess(config, model, run_dir / "engines" / f"{index}.log", version=version, device=device)
            for index in range(config.num_engines)
        ]
        return cls(
            handles,
            version=version,
            rule=rule,
            update_timeout_s=config.request_timeout_s,
            on_change=on_change,
        )

    def __enter__(self) -> EngineFleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def handles(self) -> tuple[EngineHandle, ...]:
        """Who owns the servers."""
        return tuple(member.handle for member in self._members)

    @property
    def version(self) -> int:
        """The policy version that engines must serve."""
        return self._version

    def start(self) -> None:
        """Start all engines side by side. Raises EngineError, with everything stopped again, when one fails."""
        errors: list[str] = []

        def begin(member: _Member) -> None:
            try:
                member.url, member.version = member.handle.start(), self._version
            except EngineError as error:
                errors.append(str(error))

        threads = [threading.Thread(target=begin, args=(member,)) for member in self._members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            self.stop()
            raise EngineError(errors[0])
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all engines, also those that are just starting."""
        self._stopping.set()
        while True:
            for member in self._members:
                member.handle.stop()
            watching = [thread for thread in self._threads if thread.is_alive()]
            if not watching:
                return
            watching[0].join(timeout=0.2)

    def serving(self) -> tuple[str, ...]:
        """URLs of the engines that may get requests: alive, with the current weights."""
        with self._lock:
            return tuple(m.url for m in self._members if m.url and m.version == self._version)

    def reachable(self) -> tuple[str, ...]:
        """URLs of the engines that the next publish goes to: alive, whatever their weights."""
        with self._lock:
            return tuple(m.url for m in self._members if m.url)

    def stale(self) -> tuple[str, ...]:
        """URLs of the engines that are alive and lack the current weights: publish the current version to them."""
        with self._lock:
            return tuple(m.url for m in self._members if m.url and m.version != self._version)

    def published(self, version: int, urls: Sequence[str], weights_folder: Path | None = None) -> None:
        """`version` is current from now on, and `urls` have it. Others do not serve until they have it, too.

        `weights_folder`: a checkpoint of this version, from which restarted engines load it; without one they wait for
        the next publish.
        """
        with self._lock:
            self._version = version
            self._weights_folder = weights_folder
            for member in self._members:
                if member.url in urls:
                    member.version = version
        self._changed()

    def restarts(self) -> int:
        """How many engines were restarted so far."""
        with self._lock:
            return sum(member.num_restarts for member in self._members)

    def losses(self) -> int:
        """How often an engine that was up was lost. One that does not come back counts once, however often it is tried."""
        with self._lock:
            return sum(member.num_losses for member in self._members)

    def _watch(self, member: _Member) -> None:
        with httpx.Client(timeout=self._rule.timeout_s) as http:
            while not self._stopping.wait(self._rule.interval_s * 2 ** min(member.num_failed_starts, 5)):
                self._check(http, member)

    def _check(self, http: httpx.Client, member: _Member) -> None:
        if member.url and member.handle.is_running:
            try:
                member.checks.append(http.get(f"{member.url}/health").status_code == 200)
            except httpx.HTTPError:
                member.checks.append(False)
            if member.checks.count(False) < self._rule.max_misses:
                if member.version != self._version:
                    self._bring_weights(member)
                return
        self._restart(member)

    def _restart(self, member: _Member) -> None:
        with self._lock:
            log.warning("engine %s failed its health rule or is gone: restarting it", member.url or "(none)")
            member.num_losses += bool(member.url)
            member.url, member.version, member.num_restarts = "", -1, member.num_restarts + 1
            member.checks.clear()
        self._changed()
        if self._stopping.is_set():
            return
        try:
            url = member.handle.restart()
        except EngineError as error:
            member.num_failed_starts += 1
            log.error("an engine did not come back: %s", error)
            return
        with self._lock:
            member.url, member.version, member.num_failed_starts = url, self._start_version, 0
        if member.version != self._version:
            self._bring_weights(member)
        self._changed()

    def _bring_weights(self, member: _Member) -> None:
        """Load the current version from disk into an engine that lacks it, if there is a folder."""
        version, folder = self._version, self._weights_folder
        if folder is None or not member.url:
            return
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": True,
        }
        try:
            with httpx.Client(base_url=member.url, timeout=self._update_timeout_s) as http:
                reply = http.post("/update_weights_from_disk", json=body)
                serves = http.get("/model_info").json().get("weight_version")
                if reply.status_code != 200 or serves != str(version):
                    raise EngineError(f"{member.url} serves {serves!r}: {reply.text[:300]}")
                http.post("/continue_generation", json={}).raise_for_status()
        except (httpx.HTTPError, ValueError, EngineError) as error:
            log.error("engine %s did not get version %d: %s", member.url, version, error)
            return
        with self._lock:
            member.version = version
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.serving(), self._version)
