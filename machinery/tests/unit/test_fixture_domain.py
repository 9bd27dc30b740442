"""The fixture domain's worker is the machinery's own, but it is replaced sooner when it is dead."""

from __future__ import annotations

from outbox_lab.stack import config
from tests.support import suite


def properties(text: str) -> dict[str, str]:
    """Settings of a properties file."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_the_worker_of_tests_differs_in_its_session_timeout_only() -> None:
    ours = properties((config.OURS / config.WORKER).read_text())
    used = properties(config.file(config.WORKER).read_text())
    assert config.file(config.WORKER).is_relative_to(suite.DOMAIN)
    assert {name for name in ours | used if ours.get(name) != used.get(name)} == {"session.timeout.ms"}
