"""Dead letters: events that cannot be applied, kept with their bytes and the reason, so that the stream goes on."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

from psycopg2 import extensions
from psycopg2.extras import execute_values

Header = tuple[str, bytes | None]

UPSERT = """
INSERT INTO dead_letters (sink, identity, topic, partition, "offset", key, headers, value, event_id, reason, detail)
VALUES %s
ON CONFLICT (sink, identity) DO UPDATE SET last_seen_at = now()
"""
# What the projection refused: readable events, so their columns are kept in place of their bytes.
UPSERT_REJECTED = """
INSERT INTO dead_letters (sink, identity, topic, partition, "offset", event, event_id, reason, detail)
SELECT DISTINCT ON (staged.event_id) %(sink)s, staged.event_id::text, %(topic)s, staged.partition, staged."offset",
       to_jsonb(staged), staged.event_id, rejected.reason, rejected.detail
  FROM rejected JOIN staged ON staged.event_id = rejected.event_id
 ORDER BY staged.event_id, staged.partition, staged."offset"
ON CONFLICT (sink, identity) DO UPDATE SET last_seen_at = now()
"""


@dataclass(frozen=True)
class DeadLetter:
    """A record as it came from Kafka, and why it cannot be applied. ``event_id`` is its id if that is a UUID."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    headers: Sequence[Header]
    value: bytes | None
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


def keep(cursor: extensions.cursor, sink: str, letters: Iterable[DeadLetter]) -> int:
    """Write dead letters in the caller's transaction and return how many there were.

    One that is there already is left as it is, outcome and all, but for last_seen_at.
    """
    count = 0
    first: dict[str, DeadLetter] = {}
    for letter in letters:
        first.setdefault(letter.identity, letter)
        count += 1
    # Ordered, so that two writers of the same letters do not deadlock.
    rows = [(sink, identity, *_columns(first[identity])) for identity in sorted(first)]
    if rows:
        execute_values(cursor, UPSERT, rows)
    return count


def keep_rejected(cursor: extensions.cursor, sink: str, topic: str) -> int:
    """Write what the projection left in ``rejected``, in the caller's transaction, and return how many events."""
    cursor.execute(UPSERT_REJECTED, {"sink": sink, "topic": topic})
    return cursor.rowcount


def _columns(letter: DeadLetter) -> tuple[object, ...]:
    return (
        letter.topic,
        letter.partition,
        letter.offset,
        letter.key,
        json.dumps([_header(name, value) for name, value in letter.headers]),
        letter.value,
        None if letter.event_id is None else str(letter.event_id),
        letter.reason,
        letter.detail,
    )


def _header(name: str, value: bytes | None) -> dict[str, str | None]:
    """A header as JSON: jsonb holds text without NUL only, so whatever else comes is written in base64."""
    return {**_text("key", name.encode()), **_text("value", value)}


def _text(field: str, content: bytes | None) -> dict[str, str | None]:
    try:
        text = None if content is None else content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text is not None and "\0" in text:
        return {f"{field}_base64": base64.b64encode(content or b"").decode()}
    return {field: text}
