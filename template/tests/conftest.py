"""Tests of this repository: its files agree with each other, and copies and projects made of them work."""

from __future__ import annotations

import pytest

from template.tests import scratch

pytest_plugins = ["outbox.testing.plugin"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In several processes, the one that the user has started ends last."""
    if not hasattr(session.config, "workerinput"):
        scratch.clean()
