"""The error tree. Every error of ours says what happened and what to do.

Classified once, where an episode, a batch or a command ends; kept on the episode; siblings go on.
"""

from __future__ import annotations


class SlimeCuaError(Exception):
    """Base of every error that this project raises on purpose."""


class ConfigError(SlimeCuaError, ValueError):
    """A configuration file or override is wrong. Names the key, the value and what is accepted."""


class TaskError(SlimeCuaError, ValueError):
    """A task file is broken or asks for something that this build does not have. Names file and field."""


class ActionParseError(SlimeCuaError, ValueError):
    """The policy's response holds no valid action. `code` is a short stable name, the text is told to the policy.

    Example: ActionParseError("bad_json", "the tool call is not valid JSON: Expecting ',' at character 31")
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InfrastructureError(SlimeCuaError):
    """Something under the policy failed (desktop, engine, network, disk). Never a score (I4, I8)."""


class SandboxError(InfrastructureError):
    """A desktop failed: boot, capture, input, set-up, or its host is gone."""


class UnknownOutcomeError(SandboxError):
    """The reply to an action was lost: it may have happened. It is not sent again (I7)."""


class EngineError(InfrastructureError):
    """A policy server failed or answered against its contract."""


class PromptMismatchError(EngineError):
    """The engine counted other prompt tokens or images than we sent (I1)."""


class JudgeError(InfrastructureError):
    """A judge raised, hung, was killed, or answered no number in [0, 1]. The episode is invalid, not zero."""


class CheckpointError(SlimeCuaError):
    """A checkpoint is missing, truncated, or its keys or shapes differ from the model's. Names the key."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's bytes are not those that were written. Nothing was loaded: another checkpoint can take its place."""


class DataError(SlimeCuaError, ValueError):
    """A sample cannot be trained: too long, no trained token, no positive step weight. Names the sample."""


class PreflightError(SlimeCuaError):
    """The machine lacks something the run needs. Names it and the line that brings it."""
