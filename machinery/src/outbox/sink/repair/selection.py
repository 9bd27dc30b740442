"""Which dead letters an operator means: filters, and what is found by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NamedTuple

from psycopg2 import extensions
from psycopg2.extras import RealDictCursor

from outbox.sink.remembering.dead_letters import FILTERED
from outbox.sink.writer import PARKED

Status = Literal["open", "replayed", "discarded", "all"]

CONDITIONS = {
    "sink": "sink = %(sink)s",
    "reason": "reason = %(reason)s",
    "identities": "identity = ANY(%(identities)s)",
    "key": "key = convert_to(%(key)s, 'UTF8')",
    "since": "first_seen_at >= %(since)s",
    "until": "first_seen_at < %(until)s",
    "status": "status = %(status)s",
}
OR_REPLAYED = f"""
(status = 'open' OR status = 'replayed' AND resolution IS DISTINCT FROM '{FILTERED}' AND event_id IS NOT NULL
                    AND sink = ANY(%(elsewhere)s))
"""
COLUMNS = 'sink, identity, topic, topic_id, partition, "offset", event_id, is_event, reason, detail, status, resolution'
SIZE_BYTES = "coalesce(octet_length(key), 0) + pg_column_size(headers) + coalesce(octet_length(value), 0)"
TIMES = "recorded_at, first_seen_at, last_seen_at"


class Chosen(NamedTuple):
    """A chosen letter, and the topic that it came from."""

    sink: str
    topic: str
    topic_id: str
    identity: str
    size_bytes: int = 0  # about how many its record has
    is_open: bool = True


@dataclass(frozen=True)
class Selection:
    """Letters that pass every filter that is set."""

    sink: str | None = None
    reason: str | None = None
    identities: Sequence[str] = ()
    key: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    status: Status = "open"
    elsewhere: Sequence[str] = ()  # sinks whose results may be older than the letters: replayed ones count as open

    @property
    def is_narrow(self) -> bool:
        """Whether there is any filter beside the status."""
        return any(getattr(self, name) for name in CONDITIONS if name != "status")

    def choose(self, cursor: extensions.cursor, *, with_parked: bool = False) -> list[Chosen]:
        """The letters, sink by sink, topic by topic, and in the order of the topic. ``with_parked`` adds those that are
        parked behind any letter of the same key.
        """
        condition = self._condition
        if with_parked:
            condition += (
                f" OR status = 'open' AND reason = '{PARKED}' AND (sink, topic, key) IN"  # noqa: S608
                f" (SELECT sink, topic, key FROM public.dead_letters WHERE {condition})"
            )
        cursor.execute(
            f"SELECT sink, topic, topic_id, identity, {SIZE_BYTES}, status = 'open' "  # noqa: S608
            f"FROM public.dead_letters WHERE {condition} "
            "ORDER BY sink, topic, min(first_seen_at) OVER (PARTITION BY sink, topic, topic_id), topic_id, "
            'partition, "offset"',
            self._parameters,
        )
        return [Chosen(*row) for row in cursor]

    def count(self, cursor: extensions.cursor) -> int:
        """How many there are."""
        cursor.execute(f"SELECT count(*) FROM public.dead_letters WHERE {self._condition}", self._parameters)  # noqa: S608
        return int((cursor.fetchone() or (0,))[0])

    def headlines(self, connection: extensions.connection, limit: int | None) -> list[dict[str, Any]]:
        """The letters without their content, the oldest first, at most so many."""
        return self._dicts(connection, f"{COLUMNS}, {TIMES}, key", limit)

    def in_full(self, connection: extensions.connection) -> list[dict[str, Any]]:
        """The letters with all that is kept of them, the oldest first."""
        return self._dicts(connection, f"{COLUMNS}, {TIMES}, key, headers, value", None)

    def _dicts(self, connection: extensions.connection, columns: str, limit: int | None) -> list[dict[str, Any]]:
        with connection.cursor(cursor_factory=RealDictCursor) as cursor:
            cursor.execute(
                f"SELECT {columns} FROM public.dead_letters WHERE {self._condition} "  # noqa: S608
                "ORDER BY first_seen_at, sink, identity LIMIT %(limit)s",
                {**self._parameters, "limit": limit},
            )
            return [dict(row) for row in cursor]

    @property
    def _condition(self) -> str:
        conditions = CONDITIONS | ({"status": OR_REPLAYED} if self.elsewhere else {})
        given = [sql for name, sql in conditions.items() if getattr(self, name) and getattr(self, name) != "all"]
        return " AND ".join(given) or "true"

    @property
    def _parameters(self) -> dict[str, Any]:
        return {**vars(self), "identities": list(self.identities), "elsewhere": list(self.elsewhere)}
