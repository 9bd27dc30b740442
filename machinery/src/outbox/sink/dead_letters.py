"""Dead letters: events that cannot be applied, kept with their bytes and the reason, so that the stream goes on.

An open dead letter means that its sink has not applied the event. Everything that applies an event closes its letter in
the same transaction.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.events.schema import Rejection
from outbox.kafka.headers import Header
from outbox.sink.batch import DeadRecord
from outbox.sink.layout import IS_FILTERED
from outbox.sink.records import Record

LAST_MS = 253_402_300_799_000  # the last second of the year 9999: a foreign producer may claim any time
OLDER_THAN_HORIZON = "older than the deduplication horizon"
FEW_MAX = 10_000  # letters that are read at once
STATEMENT_MAX_BYTES = 4 << 20  # of keys, headers and values; a single larger record is a statement of its own

INSERT = """
INSERT INTO dead_letters
       (sink, identity, topic_id, topic, partition, "offset", key, headers, value, recorded_at, event_id,
        reason, detail)
{rows}
ON CONFLICT (sink, identity) DO UPDATE SET last_seen_at = now(),
       status = CASE dead_letters.status WHEN 'skipped' THEN 'open' ELSE dead_letters.status END
"""
# Rejected events are valid, so their columns are kept in place of their bytes. An existing letter is open: an earlier
# record of the event was invalid, and may have had another key; or this is a replay. An event that is parked is known
# by that: what else is wrong with it may change until its turn comes.
INSERT_REJECTED = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", key, event, event_type, schema_version,
                          event_id, reason, detail)
SELECT DISTINCT ON (batch.event_id) %(sink)s, batch.event_id::text, %(topic)s, %(topic_id)s, batch.partition,
       batch."offset", convert_to(batch.{key}::text, 'UTF8'), {event}, {event_type}, {schema_version}, batch.event_id,
       rejections.reason, rejections.detail
  FROM batch JOIN rejections ON rejections.event_id = batch.event_id {events}
 ORDER BY batch.event_id, rejections.reason <> 'parked', batch.partition, batch."offset"
ON CONFLICT (sink, identity) DO UPDATE
   SET key = excluded.key, event = excluded.event, event_type = excluded.event_type,
       schema_version = excluded.schema_version, reason = excluded.reason, detail = excluded.detail, status = 'open',
       last_seen_at = now()
"""
# Postgres's estimates are of no use here: `batch` has no statistics, and letters come by the thousand in one
# transaction, so those of `dead_letters` may be of long ago. These statements let it choose nothing by them. The letter
# of each event is looked up by the primary key; `OFFSET 0` lets Postgres plan nothing else. If the sink has fewer
# letters than the batch has events, their ids are read first, and events that have none are not looked up.
FEW = f"least(%(count)s, {FEW_MAX})"
SOME = f"SELECT event_id FROM dead_letters WHERE sink = %(sink)s ORDER BY identity LIMIT {FEW}"  # noqa: S608
OF_BATCH = f"""
batch CROSS JOIN LATERAL (SELECT ctid, * FROM dead_letters
                           WHERE sink = %(sink)s AND identity = batch.event_id::text OFFSET 0) AS letter
 WHERE CASE WHEN (SELECT count(*) < {FEW} FROM ({SOME}) AS letters)
            THEN batch.event_id IN ({SOME}) ELSE true END
"""  # noqa: S608
# The same of the keys of open letters: whether that of an event may be one of them.
SOME_OPEN = f"SELECT key FROM dead_letters WHERE sink = %(sink)s AND status = 'open' ORDER BY first_seen_at LIMIT {FEW}"  # noqa: S608
MAY_BE_OPEN = f"""
CASE WHEN (SELECT count(*) < {FEW} FROM ({SOME_OPEN}) AS letters) THEN {{key}} IN ({SOME_OPEN}) ELSE true END
"""  # noqa: S608
# Ordered, so that it is answered by the index, however many other letters there are.
HAS_OPEN = "SELECT true FROM dead_letters WHERE sink = %(sink)s AND status = 'open' ORDER BY first_seen_at LIMIT 1"
# A letter that was skipped, because the sink did not ask for its event, keeps no event from being applied.
SKIPPED = "SELECT EXISTS (SELECT FROM dead_letters WHERE sink = %(sink)s AND status = 'skipped')"
# An open letter of an invalid record does not keep a valid record of the same event from being applied. Rows are
# changed by their place, which leaves Postgres no other plan. A place stays valid, because every writer of a
# sink's letters holds the sink's lock.
DROP_RESOLVED = f"""
WITH known AS (
    SELECT batch.ctid AS in_batch, letter.ctid AS place, batch.event_id
      FROM {OF_BATCH}
       AND (letter.status = ANY(%(resolved)s) OR letter.status = 'open' AND letter.event IS NOT NULL)
), seen AS (
    UPDATE dead_letters SET last_seen_at = now() WHERE ctid = ANY(ARRAY(SELECT place FROM known))
), dropped AS (
    DELETE FROM batch WHERE ctid = ANY(ARRAY(SELECT in_batch FROM known))
)
SELECT DISTINCT event_id::text FROM known
"""  # noqa: S608
MARK_REPLAYED = f"""
UPDATE dead_letters SET status = 'replayed', last_seen_at = now()
 WHERE ctid = ANY(ARRAY(
       SELECT letter.ctid
         FROM {OF_BATCH}
          AND letter.status IN ('open', 'skipped')
          AND NOT EXISTS (SELECT FROM rejections WHERE rejections.event_id = batch.event_id)))
"""  # noqa: S608
OPEN_OF_BATCH = f"SELECT DISTINCT batch.event_id::text FROM {OF_BATCH} AND letter.status IN ('open', 'skipped')"  # noqa: S608
# Also one that was replayed: what leaves the event out today has not left it out then.
SKIP_FILTERED = f"""
UPDATE dead_letters SET status = 'skipped', last_seen_at = now()
 WHERE ctid = ANY(ARRAY(
       SELECT letter.ctid FROM {OF_BATCH} AND letter.status IN ('open', 'replayed') AND batch."{IS_FILTERED}"))
"""  # noqa: S608
MARK_THESE_REPLAYED = """
UPDATE dead_letters SET status = 'replayed', last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(%(event_ids)s) AND status IN ('open', 'skipped')
"""
UPDATE_REASONS = """
UPDATE dead_letters AS letter SET reason = found.reason, detail = found.detail, last_seen_at = now()
  FROM (VALUES %s) AS found (sink, identity, reason, detail)
 WHERE letter.sink = found.sink AND letter.identity = found.identity
"""


def identity(record: Record, event_id: str | None) -> str:
    """The event's id, else a hash of key, headers and value: the same for a record that is repeated."""
    if event_id is not None:
        return event_id
    digest = hashlib.sha256()
    headers = (part for name, content in record.headers for part in (name.encode(), content))
    for part in (record.key, record.value, *headers):
        # Each part with its length, so that no two records run together to the same bytes.
        digest.update(b"-" if part is None else b"%d:%b" % (len(part), part))
    return f"sha256:{digest.hexdigest()}"


def insert(cursor: extensions.cursor, sink: str, topic: str, topic_id: str, dead: Sequence[DeadRecord]) -> int:
    """Write dead letters of records in the caller's transaction and return how many there were.

    An existing letter stays as it is, with its status, but for last_seen_at. Statements are bounded in bytes.
    """
    first: dict[str, DeadRecord] = {}
    for one in dead:
        first.setdefault(identity(one.record, one.event_id), one)
    # Ordered, so that two writers of the same letters do not deadlock.
    for chunk in _chunks(sorted(first.items(), key=lambda entry: entry[0])):
        rows = [(sink, name, topic_id, topic, *columns(one)) for name, one in chunk]
        execute_values(cursor, INSERT.format(rows="VALUES %s"), rows, page_size=len(rows))
    return len(dead)


def drop_resolved(
    cursor: extensions.cursor, sink: str, count: int, resolved: Sequence[str] = ("discarded", "replayed")
) -> list[str]:
    """Take out of ``batch``, which has ``count`` rows, the events that a dead letter has ``resolved``, by its status,
    and the valid ones that wait for a replay. Returns their ids.
    """
    cursor.execute(DROP_RESOLVED, {"sink": sink, "count": count, "resolved": list(resolved)})
    return [event_id for (event_id,) in cursor]


def has_skipped(cursor: extensions.cursor, sink: str) -> bool:
    """Whether letters were closed because the sink did not ask for their events."""
    cursor.execute(SKIPPED, {"sink": sink})
    ((found,),) = cursor.fetchall()
    return bool(found)


def mark_replayed(cursor: extensions.cursor, sink: str, count: int) -> None:
    """Close the letters of the events that this transaction has applied: those in ``batch`` that are not in
    ``rejections``. ``batch`` has ``count`` rows at most.
    """
    cursor.execute(MARK_REPLAYED, {"sink": sink, "count": count})


def open_of_batch(cursor: extensions.cursor, sink: str, count: int) -> list[str]:
    """The events in ``batch``, which has ``count`` rows at most, whose letters are to be closed once they are applied:
    for a target whose events are applied in no transaction of the database.
    """
    cursor.execute(OPEN_OF_BATCH, {"sink": sink, "count": count})
    return [event_id for (event_id,) in cursor]


def skip_filtered(cursor: extensions.cursor, sink: str, count: int) -> None:
    """Close the letters of the events in ``batch`` that a transform leaves out: such an event is not applied, and is
    not set aside either. ``batch`` has ``count`` rows at most.
    """
    cursor.execute(SKIP_FILTERED, {"sink": sink, "count": count})


def mark_these_replayed(cursor: extensions.cursor, sink: str, event_ids: Sequence[str]) -> None:
    """Close the letters of these events, which have been applied."""
    cursor.execute(MARK_THESE_REPLAYED, {"sink": sink, "event_ids": list(event_ids)})


def update_reasons(cursor: extensions.cursor, sink: str, rejections: Mapping[str, Rejection]) -> None:
    """Write why letters are invalid now, by identity."""
    rows = [(name, *rejection) for name, rejection in sorted(rejections.items())]
    if rows:
        execute_values(cursor, UPDATE_REASONS, rows, template=cursor.mogrify("(%s, %%s, %%s, %%s)", (sink,)).decode())


def headers(stored: Sequence[dict[str, Any]]) -> list[Header]:
    """The headers that a letter keeps as JSON."""
    return [((_bytes("key", header) or b"").decode(), _bytes("value", header)) for header in stored]


def _chunks(letters: Sequence[tuple[str, DeadRecord]]) -> Iterator[list[tuple[str, DeadRecord]]]:
    chunk: list[tuple[str, DeadRecord]] = []
    size_bytes = 0
    for letter in letters:
        own_bytes = _size_bytes(letter[1].record)
        if chunk and size_bytes + own_bytes > STATEMENT_MAX_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(letter)
        size_bytes += own_bytes
    if chunk:
        yield chunk


def _size_bytes(record: Record) -> int:
    parts = (record.key, record.value, *(content for _, content in record.headers))
    return sum(len(part) for part in parts if part is not None)


def columns(dead: DeadRecord) -> tuple[object, ...]:
    """The record as a row of dead_letters, from its partition to its detail."""
    record = dead.record
    return (
        dead.partition,
        dead.offset,
        record.key,
        json.dumps([_header(name, content) for name, content in record.headers]),
        record.value,
        datetime.fromtimestamp(min(max(record.recorded_ms, 0), LAST_MS) / 1000, UTC),
        dead.event_id,
        *dead.rejection,
    )


def _header(name: str, content: bytes | None) -> dict[str, str | None]:
    """A header as JSON. jsonb holds text without NUL only, so anything else is written in base64."""
    return {**_json("key", name.encode()), **_json("value", content)}


def _json(field: str, content: bytes | None) -> dict[str, str | None]:
    try:
        text = None if content is None else content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text is not None and "\0" in text:
        return {f"{field}_base64": base64.b64encode(content or b"").decode()}
    return {field: text}


def _bytes(field: str, header: Mapping[str, Any]) -> bytes | None:
    encoded, text = header.get(f"{field}_base64"), header.get(field)
    if encoded is not None:
        return base64.b64decode(encoded)
    return None if text is None else str(text).encode()
