"""Connect's log: quiet while nothing happens, so that an error stands out."""

from __future__ import annotations

import time
from collections.abc import Callable

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.relay.rest import Rest
from outbox_lab.stack.stack import Stack

WINDOW_S = 4.0
CHECKS_PER_S = 5
LINES_MAX = 10  # "No previous offsets found" alone came sixty times a second


def since_now(stack: Stack) -> Callable[[], list[str]]:
    """A function that returns the lines which Connect has logged since now."""
    log = stack.part("connect").log_file
    start = log.stat().st_size

    def lines() -> list[str]:
        with log.open("rb") as file:
            file.seek(start)
            return file.read().decode().splitlines()

    return lines


def test_an_idle_connector_and_health_checks_log_next_to_nothing(chain: Settings, stack: Stack) -> None:
    rest = Rest(chain)

    def is_polling() -> bool:
        started = stack.part("connect").log_file.read_text().rpartition(f"slot.name = {chain.connector}")[2]
        return "Processing messages" in started

    wait_for("the task to poll", is_polling, timeout_s=60)
    assert rest.offset() is None, "no event is relayed yet"
    logged = since_now(stack)
    end = time.monotonic() + WINDOW_S
    while time.monotonic() < end:
        assert stack.part("connect").is_ready()
        assert rest.state().is_running
        time.sleep(1 / CHECKS_PER_S)
    lines = logged()
    assert len(lines) < LINES_MAX, lines[:50]
