"""What the gateway must still know after kill -9: hosts and leases, in SQLite (WAL).

Heartbeats are not written: a lease that is live here was live when the gateway stopped, and gets one more ttl at start.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from sandbox_cluster.api import HostRegistration
from sandbox_cluster.errors import ApiError
from sandbox_cluster.serving import event, hold
from slime_cua.core.errors import PreflightError

R = TypeVar("R", bound=BaseModel)
LeaseState = Literal["placing", "live", "ending", "ended"]
"""placing: a host is being asked. ending: over for the client, the host has not yet said that the desktop is gone."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS hosts (host_id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    lease_id TEXT PRIMARY KEY, state TEXT NOT NULL, ended_s REAL NOT NULL DEFAULT 0, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS leases_by_state ON leases (state);
CREATE TABLE IF NOT EXISTS drains (host_id TEXT PRIMARY KEY, epoch TEXT NOT NULL);
"""


class LeaseRecord(BaseModel):
    """A lease as the gateway knows it."""

    lease_id: str
    secret: str
    key: str
    principal: str
    """Name of the token that acquired it; only this one may use it."""
    owner: str
    task_id: str = ""
    episode_id: str = ""
    ttl_s: float
    host_id: str
    host_epoch: str
    provider: str = ""
    os: str = ""
    screen_wh_px: tuple[int, int] = (0, 0)
    state: LeaseState = "placing"
    reason: str = ""
    """Why it ended."""
    has_key: bool = True
    """False: the placement came to nothing, its key is as if never used."""
    granted_s: float = 0.0
    ended_s: float = 0.0


class State:
    """The database. Every method is one transaction; a full disk is an ApiError that says so."""

    def __init__(self, folder: Path) -> None:
        """Raises PreflightError when the folder cannot hold a database, or another gateway has it."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / "gateway.sqlite"
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._lock = hold(folder, "gateway")
            self._db = sqlite3.connect(path, isolation_level=None, timeout=2.0, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute("INSERT OR REPLACE INTO hosts VALUES ('', '')")
            self._db.execute("DELETE FROM hosts WHERE host_id = ''")
        except (OSError, sqlite3.Error) as error:
            raise PreflightError(
                f"the gateway cannot keep its state in {folder}: {error}; "
                "free space there, or choose a writable folder with --state"
            ) from None

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    def hosts(self) -> list[HostRegistration]:
        return self._read("hosts", "host_id", HostRegistration)

    def put_host(self, host: HostRegistration) -> None:
        self._write("INSERT OR REPLACE INTO hosts VALUES (?, ?)", (host.host_id, host.model_dump_json()))

    def drop_host(self, host_id: str) -> None:
        self._write("DELETE FROM hosts WHERE host_id = ?", (host_id,))
        self._write("DELETE FROM drains WHERE host_id = ?", (host_id,))

    def put_drain(self, host_id: str, epoch: str) -> None:
        """That life of the host takes no new lease."""
        self._write("INSERT OR REPLACE INTO drains VALUES (?, ?)", (host_id, epoch))

    def is_drained(self, host: HostRegistration) -> bool:
        found = self._db.execute("SELECT epoch FROM drains WHERE host_id = ?", (host.host_id,)).fetchone()
        return found is not None and found[0] == host.epoch

    def leases(self) -> list[LeaseRecord]:
        return self._read("leases", "lease_id", LeaseRecord)

    def put_lease(self, lease: LeaseRecord) -> None:
        self._write(
            "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?)",
            (lease.lease_id, lease.state, lease.ended_s, lease.model_dump_json()),
        )

    def drop_leases(self, lease_ids: Iterable[str]) -> None:
        for lease_id in lease_ids:
            self._write("DELETE FROM leases WHERE lease_id = ?", (lease_id,))

    def _read(self, table: str, key: str, kind: type[R]) -> list[R]:
        """All rows. One that cannot be read is dropped: its host is told that the lease is over, or registers again."""
        found = []
        for name, body in self._db.execute(f"SELECT {key}, body FROM {table}").fetchall():
            try:
                found.append(kind.model_validate_json(body))
            except ValueError as error:
                event("state_row_dropped", table=table, row=name, error=str(error)[:300])
                self._write(f"DELETE FROM {table} WHERE {key} = ?", (name,))
        return found

    def _write(self, statement: str, values: tuple[Any, ...]) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.Error as error:
            raise ApiError(
                "unavailable",
                f"the gateway cannot write its state in {self.folder} ({error}): free space there; nothing was changed",
            ) from None
