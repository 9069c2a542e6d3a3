"""What all unit tests share: no machine fails in them, so nothing waits for a disk."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are as they would be after a sync. The e2e tests that kill runs sync for real."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
