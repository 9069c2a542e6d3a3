"""Discrete-event replay: the real rollout worker, group code and scheduler on a virtual clock. See docs/pipeline.md."""
