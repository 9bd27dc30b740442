"""Handlers that do for each event what `bench.row_by_row` does for each record: add it to a balance, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from outbox.base import log
from outbox.base.settings import Settings, load
from outbox.handlers import Event, handler
from outbox.sink import discovery
from outbox.sink.running import supervisor
from outbox.sink.running.plain import plain_engine
from outbox_lab.stack.command import SinkProcess
from psycopg2.extensions import connection

from bench.row_by_row import ADD

NAME, TRIVIAL = "handler", "trivial-handler"


@handler("balance", name=NAME)
def add(event: Event, connection: connection) -> None:
    """Add an event to its balance."""
    found = event.payload
    with connection.cursor() as cursor:
        cursor.execute(ADD, [NAME, event.key, found["currency"], found["amount"], event.version])


@handler("balance", name=TRIVIAL)
def ignore(event: Event, connection: connection) -> None:
    """Do nothing."""


class Handle(SinkProcess):
    """A handler as a process."""

    def __init__(self, name: str, settings: Settings) -> None:
        super().__init__(name, settings, [])
        self._handler = name

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", __name__, self._handler]

    def env(self) -> dict[str, str]:
        return {**super().env(), **self._settings.as_env(), "PYTHONPATH": str(Path(__file__).parents[1])}


if __name__ == "__main__":
    settings = load()
    log.configure(settings)
    chosen = {one.name: one for one in (add, ignore)}[sys.argv[1]]
    supervisor.run(settings, [discovery.resolve(settings, discovery.job_of(chosen))], engine=plain_engine)
