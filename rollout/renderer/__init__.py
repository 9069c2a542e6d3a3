"""Messages to token ids: append-only inside a segment, answers by their own ids, one placeholder an image."""

from rollout.renderer.episode import EpisodeRenderer, Prompt, replay
from rollout.renderer.renderer import Piece, Renderer

__all__ = ["EpisodeRenderer", "Piece", "Prompt", "Renderer", "replay"]
