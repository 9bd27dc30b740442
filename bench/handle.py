"""A handler that does for each event what `bench.row_by_row` does for each record."""

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

NAME = "handler"


@handler("balance", name=NAME)
def add(event: Event, connection: connection) -> None:
    """Add an event to its balance."""
    found = event.payload
    with connection.cursor() as cursor:
        cursor.execute(ADD, [NAME, event.key, found["currency"], found["amount"], event.version])


class Handle(SinkProcess):
    """This handler as a process."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(NAME, settings, [])

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", __name__]

    def env(self) -> dict[str, str]:
        return {**super().env(), **self._settings.as_env(), "PYTHONPATH": str(Path(__file__).parents[1])}


if __name__ == "__main__":
    settings = load()
    log.configure(settings)
    supervisor.run(settings, [discovery.resolve(settings, discovery.job_of(add))], engine=plain_engine)
