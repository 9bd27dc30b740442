"""The effect of events: the strategy, then the projection, and no trace of an event that either of them refuses.

A refused event must not be remembered as processed, or its replay would be taken for a duplicate. Which rows remember
it, only the strategy knows. So both run behind a savepoint: if anything is in ``rejected``, all they did is rolled
back, and they run again without it. Then a strategy need not know of the projection's refusals: it has never seen them.
What remembers a refused event is its dead letter. A batch in which something is refused costs its SQL twice; others
cost the savepoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from psycopg2 import extensions

from outbox.base.errors import Failure
from outbox.sink import dead_letters
from outbox.sink import projection as projections
from outbox.sink.strategy import Strategy

TABLES = """
CREATE TEMPORARY TABLE staged (%s) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE fresh (LIKE staged) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE rejected (event_id uuid NOT NULL, reason text NOT NULL, detail text NOT NULL)
    ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE refused (
    event_id uuid NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL, event jsonb NOT NULL,
    reason text NOT NULL, detail text NOT NULL
) ON COMMIT DELETE ROWS;
"""
REJECTED = "SELECT DISTINCT ON (event_id) event_id::text, reason, detail FROM rejected ORDER BY event_id"
# Rejected is gone with the savepoint, so what was in it comes back as parameters.
MOVE = """
WITH verdict AS (
    SELECT * FROM unnest(%s::uuid[], %s::text[], %s::text[]) AS verdict (event_id, reason, detail)
), moved AS (
    DELETE FROM staged USING verdict WHERE staged.event_id = verdict.event_id
    RETURNING staged.event_id, staged.partition, staged."offset", to_jsonb(staged), verdict.reason, verdict.detail
)
INSERT INTO refused SELECT * FROM moved
"""
# When a dead letter is what says that an event is new.
ALL_IS_NEW = "INSERT INTO fresh SELECT * FROM staged"
COUNT = """
UPDATE sinks SET applied = applied + %(applied)s, duplicates = duplicates + %(duplicates)s WHERE name = %(sink)s
"""


Rejected = tuple[str, str, str]  # event id, reason, detail


def count(cursor: extensions.cursor, sink: str, applied: int, duplicates: int) -> None:
    """Add to a sink's counts of all time, in the caller's transaction."""
    cursor.execute(COUNT, {"sink": sink, "applied": applied, "duplicates": duplicates})


class Outcome(NamedTuple):
    """What became of staged rows: so many were applied, so many events were refused; the rest were duplicates."""

    applied: int
    refused: int


class Effect:
    """What a sink does with events, on the connection that ``prepare`` was called for.

    ``staged`` is the file that lists the columns of an event, ``projection`` the SQL that applies what is in ``fresh``.
    """

    def __init__(self, strategy: Strategy, staged: Path, projection: Path) -> None:
        self.name = strategy.name
        self._strategy = strategy
        self._staged = staged.read_text()
        self._projection = projections.load(projection)

    def prepare(self, cursor: extensions.cursor) -> None:
        """Make the temporary tables of the session."""
        cursor.execute(TABLES % self._staged)

    def end(self, cursor: extensions.cursor) -> None:
        """Drop the temporary tables, so that the session may be prepared for another sink."""
        cursor.execute("DROP TABLE staged, fresh, rejected, refused")

    def take(
        self,
        cursor: extensions.cursor,
        topic: str,
        topic_id: str,
        *,
        is_replay: bool = False,
        is_below_floor: bool = False,
    ) -> Outcome:
        """Apply what is in ``staged``, in the caller's transaction, with the sink's lock held.

        Each event ends as applied or a duplicate, and an open dead letter of it is closed; or refused, with an open
        dead letter. What the projection takes out of ``fresh`` counts as a duplicate. With ``is_replay`` the rows are
        those of open dead letters, and these letters are what makes sure that each is applied once, where the strategy
        cannot: it knows no events, or with ``is_below_floor``, it has forgotten these.

        Raises Failure if strategy or projection refuse what they were not given.
        """
        parameters = {"sink": self.name, "topic": topic, "topic_id": topic_id}
        strategy = self._strategy.sql
        if is_below_floor or (is_replay and self._strategy.knows == "positions"):
            strategy = ALL_IS_NEW
        while True:
            cursor.execute("SAVEPOINT effect")
            cursor.execute(strategy, parameters)
            rejected = self._park(cursor) or self._project(cursor, parameters)
            if not rejected:
                break
            cursor.execute("ROLLBACK TO SAVEPOINT effect")
            self._set_aside(cursor, rejected)
        cursor.execute("SELECT count(*) FROM fresh")
        applied = (cursor.fetchone() or (0,))[0]
        dead_letters.close(cursor, self.name)
        return Outcome(applied, dead_letters.keep_refused(cursor, self.name, topic, topic_id))

    def _park(self, cursor: extensions.cursor) -> list[Rejected]:
        if self._projection.order is None:
            return []
        projections.park(cursor, self.name, self._projection.order)
        return _rejected(cursor)

    def _project(self, cursor: extensions.cursor, parameters: Mapping[str, str]) -> list[Rejected]:
        cursor.execute(self._projection.sql, parameters)
        return _rejected(cursor)

    def _set_aside(self, cursor: extensions.cursor, rejected: list[Rejected]) -> None:
        cursor.execute(MOVE, [list(column) for column in zip(*rejected, strict=True)])
        if not cursor.rowcount:  # or we would go on for ever
            raise Failure(
                f"sink {self.name}: strategy or projection rejects events that are not in its batch, like "
                f"{rejected[0][0]}",
                "correct it: what it puts into `rejected` comes from `staged` or `fresh`",
            )


def _rejected(cursor: extensions.cursor) -> list[Rejected]:
    cursor.execute(REJECTED)
    return cursor.fetchall()
