"""The one shape of a failed answer, and its way from core errors to HTTP and back."""

from __future__ import annotations

from slime_cua.core.errors import (
    ConfigError,
    JudgeError,
    PreflightError,
    SandboxError,
    SlimeCuaError,
    TaskError,
    UnknownOutcomeError,
)

STATUS = {
    "bad_request": 400,
    "task": 400,
    "unauthorized": 401,
    "not_found": 404,
    "conflict": 409,
    "gone": 410,
    "too_large": 413,
    "internal": 500,
    "desktop": 503,
    "unavailable": 503,
    "timeout": 504,
    "unknown_outcome": 504,
}


class ApiError(SandboxError):
    """An answer that is not a success: `kind` (a key of STATUS) and a sentence that says what to do."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = STATUS[kind]

    @property
    def body(self) -> dict[str, dict[str, str]]:
        return {"error": {"kind": self.kind, "message": str(self)}}


def to_api(error: Exception) -> ApiError:
    """`error` as an answer. Errors that are not of the tree become `internal` with their type, never a traceback."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UnknownOutcomeError):
        return ApiError("unknown_outcome", str(error))
    if isinstance(error, TaskError):
        return ApiError("task", str(error))
    if isinstance(error, SandboxError | JudgeError):
        return ApiError("desktop", str(error))
    if isinstance(error, ConfigError | PreflightError | ValueError):
        return ApiError("bad_request", str(error))
    if isinstance(error, TimeoutError):
        return ApiError("timeout", str(error) or "the call ran into its deadline")
    return ApiError("internal", f"{type(error).__name__}: {error}")


def to_core(kind: str, message: str) -> SlimeCuaError:
    """The core error a client raises for an answer of `kind`."""
    if kind == "unknown_outcome":
        return UnknownOutcomeError(message)
    if kind == "task":
        return TaskError(message)
    if kind == "unauthorized":
        return ConfigError(message)
    return SandboxError(f"{kind}: {message}")
