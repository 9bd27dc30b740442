"""Other sinks on the same topic, and what they leave."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.jvm.java import java_home
from outbox.kafka import topics
from outbox.kafka.clients import spark_options
from outbox.sink.applying.lakehouse import table
from outbox_lab.stack.process import Process

from bench import backlog, by_the_book, jdbc, merge_by_hand
from bench.event import topic

APPLIED = {
    "balances": "SELECT coalesce(sum(events), 0) FROM balances WHERE sink = %s",
    "turnover": "SELECT coalesce(sum(transfers), 0) FROM turnover WHERE sink = %s",
}
START_TIMEOUT_S = 300.0  # only a sink that hangs takes this long
EMPTY = f"TRUNCATE {{}}; DROP TABLE IF EXISTS row_events, book_events, book_batch, {jdbc.TABLE}"


class ByTheBook(Process):
    """`bench.by_the_book`, ready once it has applied something."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, settings: Settings, result: str = "balances") -> None:
        """``result`` is the table that it fills: ``balances`` or ``turnover``."""
        super().__init__(by_the_book.NAME, settings.home)
        self._settings = settings
        self._result = result
        self._checkpoint = self.folder / "checkpoint"

    def argv(self) -> Sequence[str | Path]:
        settings = self._settings
        dsn = [f"{name}={value}" for name, value in settings.dsn(SinkRole.OWNER).items() if name != "password"]
        program = [sys.executable, by_the_book.__file__, self._result]
        return [*program, topic(settings), self._checkpoint, *dsn]

    def env(self) -> Mapping[str, str]:
        return {
            "JAVA_HOME": java_home(),
            "PGPASSWORD": str(self._settings.dsn(SinkRole.OWNER)["password"]),
            "KAFKA": json.dumps(spark_options(self._settings)),
        }

    def prepare(self) -> None:
        shutil.rmtree(self._checkpoint, ignore_errors=True)

    def is_ready(self) -> bool:
        with applied(self._settings, by_the_book.NAME, self._result) as count:
            return count() > 0


class MergeByHand(Process):
    """`bench.merge_by_hand`, ready once it has merged something."""

    start_timeout_s = START_TIMEOUT_S

    def __init__(self, settings: Settings, batch_events: int) -> None:
        super().__init__("merge-by-hand", settings.home)
        self._settings, self._batch_events = settings, batch_events
        self._table, self._progress = self.folder / "table", self.folder / "progress"

    def argv(self) -> Sequence[str | Path]:
        end = topics.last_stable_offsets(self._settings, topic(self._settings))
        ends = [f"{partition}={offset}" for partition, offset in end.items()]
        program = [sys.executable, merge_by_hand.__file__, topic(self._settings)]
        return [*program, self._table, self._progress, str(self._batch_events), *ends]

    def env(self) -> dict[str, str]:
        return self._settings.as_env()

    def prepare(self) -> None:
        shutil.rmtree(self._table, ignore_errors=True)
        self._progress.write_text("0")

    def is_ready(self) -> bool:
        return self.merged() > 0

    def merged(self) -> int:
        """How many events it has merged."""
        return int(self._progress.read_text() or 0)


def empty_lakehouse(settings: Settings) -> None:
    """Let the sink `lakehouse` begin with no table."""
    shutil.rmtree(table.location(settings, merge_by_hand.SINK).removeprefix("file://"), ignore_errors=True)


def empty(settings: Settings, *results: str) -> None:
    """Let every drain begin with the same: no ids, and nothing in these tables."""
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(EMPTY.format(", ".join(results)))


def applied(settings: Settings, name: str, result: str = "balances") -> AbstractContextManager[Callable[[], int]]:
    """A function that says how many events a peer has applied."""
    return backlog.counted(settings, APPLIED[result], name)
