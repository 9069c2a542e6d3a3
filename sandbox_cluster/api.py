"""The gateway's REST contract: what rollout asks and what it gets. The host agent speaks the same bodies one level down.

    POST   /v1/leases                      AcquireRequest   -> Lease           (waits in a fair queue up to deadline_s)
    POST   /v1/leases/{id}/heartbeat       -                -> Lease
    POST   /v1/leases/{id}/setup           SetupRequest     -> SetupReply      (OSWorld config steps)
    POST   /v1/leases/{id}/step            StepRequest      -> StepReply       (GUI actions, then a settled screenshot)
    GET    /v1/leases/{id}/screenshot      -                -> image/png
    GET    /v1/leases/{id}/file?path=      -                -> bytes           (404 when there is none)
    POST   /v1/leases/{id}/execute         ExecuteRequest   -> ExecuteReply    (code action)
    POST   /v1/leases/{id}/evaluate        EvaluateRequest  -> EvaluateReply
    POST   /v1/leases/{id}/reset           -                -> Lease           (a fresh desktop under the same lease)
    DELETE /v1/leases/{id}                 -                -> 204
    GET    /v1/leases, /v1/hosts, /healthz, /metrics, /docs
    POST   /v1/hosts/{id}/drain            -                -> HostView        (no new leases on it)
    ANY    /g/{secret}/server/{path}       OSWorld's guest endpoints of the leased desktop; no token, the secret is one
    ANY    /g/{secret}/{cdp|vlc}/{path}    Chrome's debugger (websockets, too) and VLC inside the leased desktop
    Hosts, with a host token: POST /v1/hosts HostRegistration; POST /v1/hosts/{id}/beat HostBeat -> HostBeatReply
    Errors: {"error": {"kind": "...", "message": "what and what to do"}} with 400, 401, 404, 409, 410, 413, 503, 504.
Kinds: bad_request, task, unauthorized, not_found, conflict, gone, too_large, unavailable, timeout, unknown_outcome, desktop, internal.
`Authorization: Bearer TOKEN` on all but /healthz, /docs and /g. An `action_id` makes a repeated step or execute return the first result.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from slime_cua.core.actions import CodeAction, GuiAction

MAX_NAME = 1024


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Requirements(_Body):
    """What the desktop must be. Empty means any."""

    os: str = "ubuntu"
    provider: str | None = None
    screen_wh_px: tuple[int, int] | None = None
    tags: tuple[str, ...] = ()


class AcquireRequest(_Body):
    key: str = Field(min_length=1, max_length=MAX_NAME)
    """Idempotency key: a second acquire with it returns the same lease."""
    owner: str = Field(max_length=MAX_NAME)
    task_id: str = Field("", max_length=MAX_NAME)
    episode_id: str = Field("", max_length=MAX_NAME)
    requirements: Requirements = Field(default_factory=Requirements)
    deadline_s: float = Field(60.0, ge=0, le=604_800)
    ttl_s: float = Field(30.0, gt=0, le=3600)
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
    timeout_s: float = Field(120.0, gt=0)


class SetupReply(_Body):
    seconds: float


class Settle(_Body):
    """Wait until the screen did not change for quiet_ms, at most max_ms."""

    quiet_ms: int = Field(60, ge=0)
    max_ms: int = Field(1000, ge=0)


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
    timeout_s: float = Field(30.0, gt=0)
    """Less than the call's own deadline (x-deadline-s), or nothing is run."""
    max_output_bytes: int = Field(20_000, ge=0, le=64 << 20)


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
    timeout_s: float = Field(60.0, gt=0)


class EvaluateReply(_Body):
    score: float | None
    """In [0, 1]; None when no honest score exists, with the reason in invalid_reason (I8)."""
    invalid_reason: str | None = None
    details: dict[str, Any] = Field(default_factory=dict)


class ErrorBody(_Body):
    kind: str
    message: str


class LeaseView(_Body):
    """A lease as lists show it: without its secret."""

    lease_id: str
    owner: str
    task_id: str
    episode_id: str
    host_id: str
    provider: str
    state: str
    expires_s: float


class HostRegistration(_Body):
    """What a host agent says of itself when it starts. A new epoch means: desktops of the old one are gone."""

    host_id: str
    epoch: str
    url: str
    call_token: str
    """The gateway shows this token when it calls the host."""
    provider: str
    os: str
    screen_wh_px: tuple[int, int]
    tags: tuple[str, ...] = ()
    num_slots: int = Field(ge=1)
    """Desktops that can be leased at once."""


class HostBeat(_Body):
    """Sent every second or so; silence means the host is lost."""

    epoch: str
    num_ready: int
    leases: tuple[str, ...] = ()
    """Lease ids bound to a desktop here."""
    lost: dict[str, str] = Field(default_factory=dict)
    """Lease id -> why its desktop is gone."""
    is_draining: bool = False
    last_error: str = ""
    num_black_captures: int = 0
    """Screens that were black twice in a row, since the host started."""


class HostBeatReply(_Body):
    release: tuple[str, ...] = ()
    """Of the leases in the beat, those that ended: their desktops are to be destroyed."""
    is_draining: bool = False


class HostView(_Body):
    host_id: str
    state: str
    """up, draining or lost."""
    provider: str
    os: str
    screen_wh_px: tuple[int, int]
    tags: tuple[str, ...]
    num_slots: int
    num_leased: int
    num_ready: int
    last_error: str = ""


class BindRequest(_Body):
    """Gateway to host: give this lease a desktop. Sent again it answers the same."""

    wait_s: float = 30.0
    owner: str = ""
    task_id: str = ""
    episode_id: str = ""


class BindReply(_Body):
    desktop_id: str
    provider: str
    os: str
    screen_wh_px: tuple[int, int]
    clock_skew_s: float = 0.0
    """The desktop's clock less the host's when it was handed out."""
