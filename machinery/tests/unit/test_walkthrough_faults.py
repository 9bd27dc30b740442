"""The faults of single parts leave the sinks running, whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outbox.base.wait import WaitTimeoutError
from outbox_lab.walkthrough import faults
from outbox_lab.walkthrough.chain import Chain


class Sinks:
    """Sinks that note what is done to them."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def resume(self) -> None:
        self.done.append("resume")

    def start(self) -> None:
        self.done.append("start")

    def kill(self) -> None:
        raise WaitTimeoutError("they do not end")


class Window:
    """A window that is missed, with Spark frozen."""

    def __init__(self, sinks: Sinks) -> None:
        self._sinks = sinks

    def kill_in_it(self, _: Callable[[], None]) -> dict[str, Any]:
        raise WaitTimeoutError("the sinks do not commit")

    def close(self) -> None:
        self._sinks.done.append("release")


@pytest.fixture
def sinks() -> Sinks:
    return Sinks()


@pytest.fixture
def chain(sinks: Sinks) -> Chain:
    return cast(Chain, SimpleNamespace(settings=None, sinks=sinks))


def test_sinks_that_missed_the_window_run_again(chain: Chain, sinks: Sinks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "Window", lambda *_: Window(sinks))
    with pytest.raises(WaitTimeoutError, match="commit"):
        faults.crash_sinks(chain, ["dedup"], lambda: None)
    assert sinks.done[:3] == ["release", "resume", "start"]


def test_sinks_that_were_not_rewound_run_again(chain: Chain, sinks: Sinks) -> None:
    with pytest.raises(WaitTimeoutError, match="end"):
        faults.rewind_sink(chain, "dedup")
    assert sinks.done == ["start"]
