"""Programs that run inside a desktop: standard library only, never imported by a training process."""
