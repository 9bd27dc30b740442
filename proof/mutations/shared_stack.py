"""A plugin of pytest: the session's stack is one that outlives the session, so that the next one finds it running."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

VARIABLE = "MUTATIONS_STACK"  # names the folder of the stack


@pytest.fixture(scope="session")
def shared_stack_home() -> Path:
    """The folder of the shared stack. A session ends only the stacks in its own folder."""
    return Path(os.environ[VARIABLE])


def pytest_configure(config: pytest.Config) -> None:
    """Let it replace the ``stack_home`` of ``outbox_lab.testing``, whose plugin is registered before."""
    late = ModuleType(f"{__name__}.late")
    vars(late)["stack_home"] = shared_stack_home
    config.pluginmanager.register(late)
