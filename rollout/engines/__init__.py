"""Policy servers: their processes, the fleet of a run, and the client that asks them."""

from rollout.engines.client import EngineClient, Generation, image_ref
from rollout.engines.fleet import EngineFleet, EngineHandle, HealthRule
from rollout.engines.policy import EnginePolicy
from rollout.engines.process import EngineProcess

__all__ = [
    "EngineClient",
    "EngineFleet",
    "EngineHandle",
    "EnginePolicy",
    "EngineProcess",
    "Generation",
    "HealthRule",
    "image_ref",
]
