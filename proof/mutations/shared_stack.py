"""A plugin of pytest: the session's stack is one that outlives the session, so that the next one finds it running."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VARIABLE = "MUTATIONS_STACK"  # names the folder of the stack


class SharedStack:
    """Another ``stack_home`` than that of ``outbox.testing``, whose session ends only stacks in its own folder."""

    @pytest.fixture(scope="session")
    def stack_home(self) -> Path:
        """The folder of the shared stack."""
        return Path(os.environ[VARIABLE])


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixture behind those of the conftest, which it replaces."""
    config.pluginmanager.register(SharedStack())
