"""The gateway's REST contract: what rollout asks and what it gets. The host agent speaks the same bodies one level down.

    POST   /v1/leases                      AcquireRequest   -> Lease           (waits in a fair queue up to deadline_s)
    POST   /v1/leases/{id}/heartbeat       -                -> Lease
    POST   /v1/leases/{id}/setup           SetupRequest     -> SetupReply      (OSWorld config steps)
    POST   /v1/leases/{id}/step            StepRequest      -> StepReply       (GUI actions, then a settled screenshot)
    GET    /v1/leases/{id}/screenshot      -                -> image/png
    POST   /v1/leases/{id}/execute         ExecuteRequest   -> ExecuteReply    (code action)
    POST   /v1/leases/{id}/evaluate        EvaluateRequest  -> EvaluateReply
    POST   /v1/leases/{id}/reset           -                -> Lease           (a fresh desktop under the same lease)
    DELETE /v1/leases/{id}                 -                -> 204
    GET    /v1/leases, /v1/hosts, /healthz, /metrics, /docs
    Errors: {"error": {"kind": "...", "message": "what and what to do"}} with 400, 401, 404, 409, 410, 503, 504.
`Authorization: Bearer TOKEN` on all but /healthz. An `action_id` makes a repeated step or execute return the first result.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slime_cua.core.actions import CodeAction, GuiAction


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Requirements(_Body):
    """What the desktop must be. Empty means any."""

    os: str = "ubuntu"
    provider: str | None = None
    screen_wh_px: tuple[int, int] | None = None
    tags: tuple[str, ...] = ()


class AcquireRequest(_Body):
    key: str
    """Idempotency key: a second acquire with it returns the same lease."""
    owner: str
    task_id: str = ""
    episode_id: str = ""
    requirements: Requirements = Field(default_factory=Requirements)
    deadline_s: float = 60.0
    ttl_s: float = 30.0
    """The lease ends this long after its last heartbeat (any call counts as one)."""


class Lease(_Body):
    lease_id: str
    secret: str
    """Capability for OSWorld pass-through paths, /g/<secret>/server/...; dies with the lease; never logged."""
    key: str
    owner: str
    task_id: str
    episode_id: str
    host_id: str
    provider: str
    os: str
    screen_wh_px: tuple[int, int]
    expires_s: float
    """Unix time."""


class SetupRequest(_Body):
    config: tuple[dict[str, Any], ...] = ()
    task_id: str = ""
    timeout_s: float = 120.0


class SetupReply(_Body):
    seconds: float


class Settle(_Body):
    """Wait until the screen did not change for quiet_ms, at most max_ms."""

    quiet_ms: int = 60
    max_ms: int = 1000


class StepRequest(_Body):
    action_id: str
    actions: tuple[GuiAction, ...] = ()
    """Points in any named space; the guest converts with core.coordinates.to_pixels."""
    settle: Settle = Field(default_factory=Settle)


class StepReply(_Body):
    png_base64: str
    sha256: str
    width_px: int
    height_px: int
    time_s: float
    is_settled: bool
    is_replay: bool = False
    """True when action_id was known and the first result is returned."""


class ExecuteRequest(_Body):
    action_id: str
    action: CodeAction
    timeout_s: float = 30.0
    max_output_bytes: int = 20_000


class ExecuteReply(_Body):
    stdout: str
    stderr: str
    returncode: int | None
    is_timeout: bool = False
    is_truncated: bool = False
    is_replay: bool = False


class EvaluateRequest(_Body):
    task_id: str = ""
    evaluator: dict[str, Any]
    last_action: str | None = None
    """"DONE", "FAIL" or None (step limit), for infeasible tasks (OSWorld's rule)."""
    timeout_s: float = 60.0


class EvaluateReply(_Body):
    score: float | None
    """In [0, 1]; None when no honest score exists, with the reason in invalid_reason (I8)."""
    invalid_reason: str | None = None
    details: dict[str, Any] = Field(default_factory=dict)
