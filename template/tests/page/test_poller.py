"""The thread that reads the chain: it lives on after any error, and the page says so."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from outbox.base.wait import wait_for

from demo.page.hub import Hub
from demo.page.player import LOGS, TABLES
from demo.page.poller import Poller
from demo.page.readings import Readings
from template.tests.page.made_up import MadeUp

AT_MS = 1_790_000_000_000


@pytest.fixture
def hub() -> Hub:
    return Hub(LOGS, TABLES)


@contextmanager
def running(hub: Hub, read: Callable[[], Readings | None]) -> Iterator[Poller]:
    """A poller that somebody looks at."""
    poller = Poller(read, hub)
    frames = hub.subscribe()
    hub.publish({"stage": {}})
    next(frames)
    poller.start()
    yield poller
    hub.close()
    poller.stop()


def test_unexpected_error_is_logged_once_and_the_page_recovers(
    hub: Hub, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.page.poller.EVERY_S", 0.01)
    model, reads, is_broken = MadeUp(), [0], threading.Event()

    def read() -> Readings:
        reads[0] += 1
        if is_broken.is_set():
            raise ValueError("a secret")
        return model.readings(AT_MS)

    is_broken.set()
    with running(hub, read):
        wait_for("the page to say so", lambda: "down" in (hub.part("sinks") or {}), timeout_s=10)
        wait_for("more readings", lambda: reads[0] > 3, timeout_s=10)
        assert "ValueError" in hub.part("source")["down"]
        assert "secret" not in hub.part("source")["down"]
        assert [one.levelno for one in caplog.records] == [logging.ERROR]
        is_broken.clear()
        wait_for("the page to come back", lambda: "down" not in hub.part("sinks"), timeout_s=10)


def test_the_end_does_not_wait_for_ever(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.page.poller.STOP_TIMEOUT_S", 0.05)
    reads, go_on = threading.Event(), threading.Event()

    def read() -> None:
        reads.set()
        assert go_on.wait(30)

    with running(hub, read) as poller:
        assert reads.wait(10)
        assert not poller.stop()
        go_on.set()
        wait_for("the thread to end", poller.stop, timeout_s=10)


def test_what_has_settled_is_what_was_done_last(hub: Hub) -> None:
    model, said = MadeUp(), list[str]()
    poller = Poller(lambda: model.readings(AT_MS), hub)
    poller.forget_settled()
    poller.when_settled(lambda _: said.append("first"))
    poller.read_once()
    poller.forget_settled()  # the second begins
    poller.read_once()
    poller.when_settled(lambda _: said.append("second"))
    assert said == []
    for _ in range(3):
        poller.read_once()
    assert said == ["second"]
    assert not poller.has_gap
