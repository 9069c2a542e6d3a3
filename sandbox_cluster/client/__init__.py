"""Client of the sandbox gateway."""

from sandbox_cluster.client.client import SandboxClient
from sandbox_cluster.client.sandbox import Sandbox, Shot

__all__ = ["Sandbox", "SandboxClient", "Shot"]
