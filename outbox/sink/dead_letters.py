"""Dead letters: events that cannot be applied, kept with their bytes and the reason, so that the stream goes on."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.sink.verdict import Header, Verdict

# The reason of an event of which the strategy cannot tell any more whether it was applied (outbox/maintenance/retention.py).
BELOW_FLOOR = "below the retention floor"
UPSERT = """
INSERT INTO dead_letters
       (sink, identity, topic_id, topic, partition, "offset", key, headers, value, recorded_at, event_id,
        reason, detail)
VALUES %s
ON CONFLICT (sink, identity) DO UPDATE SET last_seen_at = now()
"""
# What strategy or projection refused: readable events, so their columns are kept in place of their bytes. A letter
# that is there is open: an earlier record of the event could not be read, or this is a replay.
UPSERT_REFUSED = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", event, event_id, reason, detail)
SELECT DISTINCT ON (refused.event_id) %(sink)s, event_id::text, %(topic)s, %(topic_id)s, partition, "offset", event,
       event_id, reason, detail
  FROM refused
 ORDER BY refused.event_id, refused.partition, refused."offset"
ON CONFLICT (sink, identity) DO UPDATE
   SET event = excluded.event, reason = excluded.reason, detail = excluded.detail, last_seen_at = now()
"""
# An open letter of a record that could not be read does not stand in the way of the same event in good order: nobody
# could apply it from the letter.
RECALL = """
WITH known AS (
    DELETE FROM staged USING dead_letters AS letter
     WHERE letter.sink = %(sink)s AND letter.identity = staged.event_id::text
       AND (letter.status <> 'open' OR letter.event IS NOT NULL)
    RETURNING letter.identity
)
UPDATE dead_letters SET last_seen_at = now()
 WHERE sink = %(sink)s AND identity IN (SELECT identity FROM known)
RETURNING identity
"""
CLOSE = """
UPDATE dead_letters AS letter SET status = 'replayed', last_seen_at = now()
  FROM staged
 WHERE letter.sink = %(sink)s AND letter.identity = staged.event_id::text AND letter.status = 'open'
"""
VERDICTS = """
UPDATE dead_letters AS letter SET reason = found.reason, detail = found.detail, last_seen_at = now()
  FROM (VALUES %s) AS found (sink, identity, reason, detail)
 WHERE letter.sink = found.sink AND letter.identity = found.identity
"""


@dataclass(frozen=True)
class DeadLetter:
    """A record as it came from Kafka, and why it cannot be applied.

    ``recorded_ms`` is its timestamp; ``event_id`` is its id, if that is a UUID.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    headers: Sequence[Header]
    value: bytes | None
    recorded_ms: int
    event_id: UUID | None
    reason: str
    detail: str

    @property
    def identity(self) -> str:
        """The event's id, else a hash of key, headers and value: the same for a record that is sent again."""
        if self.event_id is not None:
            return str(self.event_id)
        digest = hashlib.sha256()
        for part in (self.key, self.value, *(part for name, value in self.headers for part in (name.encode(), value))):
            # Each part with its length, so that no two records run together to the same bytes.
            digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
        return f"sha256:{digest.hexdigest()}"


def keep(cursor: extensions.cursor, sink: str, topic_id: str, letters: Iterable[DeadLetter]) -> int:
    """Write dead letters in the caller's transaction and return how many there were.

    One that is there already is left as it is, outcome and all, but for last_seen_at.
    """
    count = 0
    first: dict[str, DeadLetter] = {}
    for letter in letters:
        first.setdefault(letter.identity, letter)
        count += 1
    # Ordered, so that two writers of the same letters do not deadlock.
    rows = [(sink, identity, topic_id, *_columns(first[identity])) for identity in sorted(first)]
    if rows:
        execute_values(cursor, UPSERT, rows)
    return count


def recall(cursor: extensions.cursor, sink: str) -> list[str]:
    """Take out of ``staged`` what a dead letter has settled, in the caller's transaction, and return the events' ids:
    those that were discarded or replayed, and those that wait, readable, for a replay.
    """
    cursor.execute(RECALL, {"sink": sink})
    return [identity for (identity,) in cursor]


def close(cursor: extensions.cursor, sink: str) -> None:
    """Note as replayed, in the caller's transaction, the open letters of the events in ``staged``: they are applied."""
    cursor.execute(CLOSE, {"sink": sink})


def keep_refused(cursor: extensions.cursor, sink: str, topic: str, topic_id: str) -> int:
    """Write what is in ``refused``, in the caller's transaction, and return how many events."""
    cursor.execute(UPSERT_REFUSED, {"sink": sink, "topic": topic, "topic_id": topic_id})
    return cursor.rowcount


def keep_verdicts(cursor: extensions.cursor, sink: str, verdicts: Mapping[str, Verdict]) -> None:
    """Write what is wrong with letters now, by identity, in the caller's transaction."""
    rows = [(identity, *verdict) for identity, verdict in sorted(verdicts.items())]
    if rows:
        execute_values(cursor, VERDICTS, rows, template=cursor.mogrify("(%s, %%s, %%s, %%s)", (sink,)).decode())


def _columns(letter: DeadLetter) -> tuple[object, ...]:
    return (
        letter.topic,
        letter.partition,
        letter.offset,
        letter.key,
        json.dumps([_header(name, value) for name, value in letter.headers]),
        letter.value,
        datetime.fromtimestamp(letter.recorded_ms / 1000, UTC),
        None if letter.event_id is None else str(letter.event_id),
        letter.reason,
        letter.detail,
    )


def _header(name: str, value: bytes | None) -> dict[str, str | None]:
    """A header as JSON: jsonb holds text without NUL only, so whatever else comes is written in base64."""
    return {**_text("key", name.encode()), **_text("value", value)}


def headers(stored: Sequence[dict[str, Any]]) -> list[Header]:
    """The headers that were kept as such JSON."""
    return [((_bytes("key", header) or b"").decode(), _bytes("value", header)) for header in stored]


def _bytes(field: str, content: dict[str, Any]) -> bytes | None:
    encoded, text = content.get(f"{field}_base64"), content.get(field)
    if encoded is not None:
        return base64.b64decode(encoded)
    return None if text is None else str(text).encode()


def _text(field: str, content: bytes | None) -> dict[str, str | None]:
    try:
        text = None if content is None else content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text is not None and "\0" in text:
        return {f"{field}_base64": base64.b64encode(content or b"").decode()}
    return {field: text}
