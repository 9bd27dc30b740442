"""Dead letters: events that cannot be applied, kept with the reason, so that the stream goes on.

A letter keeps the record as it came: key, headers and value. So a replay is what a delivery is. `is_event` says that
the record was a valid event, which strategy, projection or transform have refused: the strategy has seen it. Otherwise
the decoder has refused the record, whatever id it claims.

An open dead letter means that its sink has not applied the event. Everything that applies an event closes its letter in
the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from outbox.base.heavy import extensions, extras, sql
from outbox.events.schema import Rejection
from outbox.sink.decoding import binary, dead_records
from outbox.sink.decoding.batch import Chunk
from outbox.sink.decoding.layout import IS_FILTERED
from outbox.sink.decoding.records import DeadRecord, Fetch, Place, Record

T = TypeVar("T")


OLDER_THAN_HORIZON = "older than the deduplication horizon"
NOT_ASKED_FOR = "not asked for"
FILTERED = "filtered"  # the resolution of a letter whose event the sink's transform has left out
FEW_MAX = 10_000  # letters that are read at once
STATEMENT_MAX_BYTES = 4 << 20  # of keys, headers and values; a single larger record is a statement of its own

COLUMNS = """
sink, identity, topic_id, topic, partition, "offset", key, headers, value, recorded_at, event_id, reason, detail
"""
DEAD_TABLE = sql.Identifier("pg_temp", "outbox_dead")
TABLE = sql.SQL("CREATE TEMPORARY TABLE outbox_dead ({}) ON COMMIT DELETE ROWS").format(
    binary.definitions(dead_records.TYPES)
)
# A record of an erased key is left out. Ordered, so that two writers of the same letters do not deadlock.
INSERT = f"""
INSERT INTO public.dead_letters ({COLUMNS})
SELECT DISTINCT ON (dead.identity) %(sink)s, dead.identity, %(topic_id)s, %(topic)s, dead.partition, dead."offset",
       dead.key, dead.headers, dead.value, dead.recorded_at, dead.event_id, dead.reason, dead.detail
  FROM pg_temp.outbox_dead AS dead
 WHERE NOT EXISTS (SELECT FROM public.erased_keys AS erased
                    WHERE erased.topic = %(topic)s AND erased.key_hash = sha256(dead.key)
                      AND (dead.event_id <= erased.until OR dead.recorded_at <= erased.erased_at))
 ORDER BY dead.identity, dead.partition, dead."offset"
ON CONFLICT (sink, identity) DO UPDATE SET last_seen_at = now()
"""  # noqa: S608
# The dead letter of a valid event replaces the dead letter of an undecodable record that has the same id.
INSERT_REJECTED = f"""
INSERT INTO public.dead_letters ({COLUMNS}, is_event, version) VALUES %s
ON CONFLICT (sink, identity) DO UPDATE
   SET topic_id = excluded.topic_id, topic = excluded.topic, partition = excluded.partition,
       "offset" = excluded."offset", key = excluded.key, headers = excluded.headers, value = excluded.value,
       recorded_at = excluded.recorded_at, event_id = excluded.event_id, reason = excluded.reason,
       detail = excluded.detail, is_event = excluded.is_event, version = excluded.version,
       status = 'open', resolution = NULL, last_seen_at = now()
"""  # noqa: S608
# Postgres's estimates are of no use here: `batch` has no statistics, and letters come by the thousand in one
# transaction, so those of `dead_letters` may be of long ago. These statements let it choose nothing by them. The letter
# of each event is looked up by the primary key; `OFFSET 0` lets Postgres plan nothing else. If the sink has fewer
# letters than the batch has events, their ids are read first, and events that have none are not looked up.
FEW = f"least(%(count)s, {FEW_MAX})"
SOME = f"""
SELECT few.event_id FROM public.dead_letters AS few WHERE few.sink = %(sink)s ORDER BY few.identity LIMIT {FEW}
"""  # noqa: S608
OF_BATCH = f"""
pg_temp.outbox_batch AS batch
CROSS JOIN LATERAL (SELECT found.ctid, found.* FROM public.dead_letters AS found
                     WHERE found.sink = %(sink)s AND found.identity = batch.event_id::text OFFSET 0) AS letter
 WHERE CASE WHEN (SELECT count(*) < {FEW} FROM ({SOME}) AS letters)
            THEN batch.event_id IN ({SOME}) ELSE true END
"""  # noqa: S608
# Whether the key of an event may be one of an open letter.
SOME_OPEN = f"""
SELECT few.key FROM public.dead_letters AS few
 WHERE few.sink = %(sink)s AND few.status = 'open' ORDER BY few.first_seen_at LIMIT {FEW}
"""  # noqa: S608
MAY_BE_OPEN = f"""
CASE WHEN (SELECT count(*) < {FEW} FROM ({SOME_OPEN}) AS letters) THEN {{key}} IN ({SOME_OPEN}) ELSE true END
"""  # noqa: S608
# Ordered, so that it is answered by the index, however many other letters there are.
HAS_OPEN = """
SELECT true FROM public.dead_letters AS few
 WHERE few.sink = %(sink)s AND few.status = 'open' ORDER BY few.first_seen_at LIMIT 1
"""
AT_ITS_PLACE = """
letter.topic_id = %(topic_id)s AND letter.partition = batch.partition AND letter."offset" = batch."offset"
"""
# A letter of an undecodable record does not keep an event with its id from being applied. If that letter is discarded,
# only the record itself is dropped: at its place, or, which the caller finds out, a copy of it elsewhere. Rows are
# changed by their ctid, which leaves Postgres no other plan. It stays valid, because every writer of a sink's letters
# holds the sink's lock.
DROP_RESOLVED = f"""
WITH known AS MATERIALIZED (
    SELECT batch.ctid AS in_batch, letter.ctid AS in_letters, batch.event_id, batch.partition, batch."offset",
           CASE letter.status WHEN 'open' THEN letter.is_event
                              WHEN 'replayed' THEN %(drop_replayed)s
                              ELSE letter.is_event OR ({AT_ITS_PLACE}) END AS is_resolved
      FROM {OF_BATCH}
       AND (letter.status <> 'open' OR letter.is_event)
), seen AS (
    UPDATE public.dead_letters AS letter SET last_seen_at = now()
     WHERE letter.ctid = ANY(ARRAY(SELECT known.in_letters FROM known WHERE known.is_resolved))
), dropped AS (
    DELETE FROM pg_temp.outbox_batch AS batch
     WHERE batch.ctid = ANY(ARRAY(SELECT known.in_batch FROM known WHERE known.is_resolved))
)
SELECT known.event_id::text, known.partition, known."offset", known.is_resolved FROM known
"""  # noqa: S608
DISCARDED_RECORDS = """
SELECT letter.identity, letter.key, letter.headers, letter.value
  FROM public.dead_letters AS letter
 WHERE letter.sink = %(sink)s AND letter.identity = ANY(%(identities)s)
   AND letter.status = 'discarded' AND NOT letter.is_event
"""
DROP_PLACES = """
DELETE FROM pg_temp.outbox_batch AS batch
 USING unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS place (partition, "offset")
 WHERE batch.partition = place.partition AND batch."offset" = place."offset"
"""
OPEN_OF_BATCH = f"SELECT DISTINCT batch.event_id::text FROM {OF_BATCH} AND letter.status = 'open'"  # noqa: S608
APPLIED_OF_BATCH = f"""
{OPEN_OF_BATCH}
   AND NOT EXISTS (SELECT FROM pg_temp.rejections AS rejected WHERE rejected.event_id = batch.event_id)
"""
FILTERED_OF_BATCH = f"""
SELECT DISTINCT batch.event_id::text FROM {OF_BATCH} AND letter.status <> 'discarded' AND batch."{IS_FILTERED}"
   AND NOT EXISTS (SELECT FROM pg_temp.rejections AS rejected WHERE rejected.event_id = batch.event_id)
"""  # noqa: S608
# Closes open letters. A replayed letter gets another resolution: today's transform may leave out an event that it took
# before. The CASE hides the status from the planner, so that Postgres looks letters up by the primary key, and not in
# an index of open letters.
CLOSE = """
UPDATE public.dead_letters AS letter
   SET status = 'replayed', resolution = %(resolution)s, last_seen_at = now()
 WHERE letter.sink = %(sink)s AND letter.identity = ANY(%(identities)s)
   AND CASE letter.status WHEN 'open' THEN true WHEN 'replayed' THEN %(resolution)s::text IS NOT NULL ELSE false END
"""
DISCARD = """
UPDATE public.dead_letters SET status = 'discarded', resolution = %(resolution)s, last_seen_at = now()
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
"""
# What is set aside for another reason is tried for the first time.
BEGIN_RETRY = """
UPDATE public.dead_letters
   SET retries = retries + CASE WHEN reason = %(reason)s THEN 1 ELSE 0 END, reason = %(reason)s, detail = %(detail)s,
       last_seen_at = clock_timestamp()
 WHERE sink = %(sink)s AND identity = ANY(%(identities)s) AND status = 'open'
"""
# Of an event that is rejected for several reasons: that it is parked, because what else is wrong with it may change
# until its turn comes. `has_letter`: it was set aside before, and is replayed.
REJECTED = """
SELECT DISTINCT ON (batch.event_id) batch.event_id::text, batch.partition, batch."offset", {version}::bigint,
       rejected.reason, rejected.detail, letter.identity IS NOT NULL AS has_letter
  FROM pg_temp.outbox_batch AS batch
  JOIN pg_temp.rejections AS rejected ON rejected.event_id = batch.event_id
  LEFT JOIN LATERAL (SELECT found.* FROM public.dead_letters AS found
                      WHERE found.sink = %(sink)s AND found.identity = batch.event_id::text OFFSET 0) AS letter
    ON letter.is_event AND letter.status = 'open'
 ORDER BY batch.event_id, rejected.reason <> 'parked', batch.partition, batch."offset"
"""
# Of an event that is older than the horizon, the reason says that the strategy knows nothing of it. A letter that was
# replayed opens again: the sink's result has lost its event.
UPDATE_REASONS = f"""
UPDATE public.dead_letters AS letter
   SET reason = found.reason, detail = found.detail, status = 'open', last_seen_at = now()
  FROM (VALUES %s) AS found (sink, identity, reason, detail)
 WHERE letter.sink = found.sink AND letter.identity = found.identity AND letter.reason <> '{OLDER_THAN_HORIZON}'
"""  # noqa: S608


def insert(cursor: extensions.cursor, sink: str, topic: str, topic_id: str, chunk: Chunk) -> None:
    """Write the dead letters of a chunk's undecodable records in the caller's transaction.

    An existing letter stays as it is, with its status, but for last_seen_at.
    """
    if chunk.dead_count:
        for some in chunk.dead:
            some.copy(cursor, DEAD_TABLE)
        cursor.execute(INSERT, {"sink": sink, "topic": topic, "topic_id": topic_id})


def insert_rejected(
    cursor: extensions.cursor, sink: str, topic: str, topic_id: str, *, version: str, fetch: Fetch
) -> int:
    """Set aside the events of ``batch`` that are in ``rejections``, in the caller's transaction; return how many.

    Each letter keeps its record as ``fetch`` reads it from the topic. A letter that an event has already keeps its
    record and gets today's reason. ``version`` is the SQL of the event's version.
    """
    cursor.execute(REJECTED.replace("{version}", version), {"sink": sink})
    known: dict[str, Rejection] = {}
    new: dict[Place, tuple[str, int | None, Rejection]] = {}
    for event_id, partition, offset, version_of_event, reason, detail, has_letter in cursor:
        rejection = Rejection(reason, detail)
        if has_letter:
            known[event_id] = rejection
        else:
            new[partition, offset] = event_id, version_of_event, rejection
    update_reasons(cursor, sink, known)
    fetched = fetch(topic, new) if new else ()
    for chunk in in_chunks(fetched, lambda entry: _size_bytes(entry[1]), STATEMENT_MAX_BYTES):
        rows = []
        for (partition, offset), record in chunk:
            event_id, version_of_event, rejection = new[partition, offset]
            dead = DeadRecord(partition, offset, record, event_id, rejection)
            rows.append((sink, event_id, topic_id, topic, *dead_records.columns(dead), True, version_of_event))
        extras.execute_values(cursor, INSERT_REJECTED, rows, page_size=len(rows))
    return len(known) + len(new)


def drop_resolved(
    cursor: extensions.cursor,
    sink: str,
    topic: str,
    topic_id: str,
    *,
    count: int,
    fetch: Fetch,
    drop_replayed: bool = True,
) -> set[str]:
    """Take out of ``batch``, which has ``count`` rows, the events that are set aside, discarded, or were replayed.

    Returns the ids that ``batch`` no longer has. With ``drop_replayed`` off, events that were replayed stay.
    """
    cursor.execute(DROP_RESOLVED, {"sink": sink, "topic_id": topic_id, "count": count, "drop_replayed": drop_replayed})
    dropped, doubtful = set[str](), dict[Place, str]()
    for event_id, partition, offset, is_resolved in cursor:
        if is_resolved:
            dropped.add(event_id)
        else:
            doubtful[partition, offset] = event_id
    if doubtful:
        copies = _drop_copies(cursor, sink, topic, doubtful, fetch)
        dropped |= {doubtful[place] for place in copies}
        dropped -= {event_id for place, event_id in doubtful.items() if place not in copies}
    return dropped


def _drop_copies(
    cursor: extensions.cursor, sink: str, topic: str, doubtful: Mapping[Place, str], fetch: Fetch
) -> set[Place]:
    """Take out of ``batch`` the records that are copies of discarded ones; returns their places."""
    cursor.execute(DISCARDED_RECORDS, {"sink": sink, "identities": list(set(doubtful.values()))})
    discarded = {
        name: dead_records.digest(dead_records.record(key, headers, value)) for name, key, headers, value in cursor
    }
    of_interest = [place for place, event_id in doubtful.items() if event_id in discarded]
    if not of_interest:
        return set()
    copies = {
        place
        for place, record in fetch(topic, of_interest)
        if dead_records.digest(record) == discarded[doubtful[place]]
    }
    cursor.execute(
        DROP_PLACES,
        {"partitions": [partition for partition, _ in copies], "offsets": [offset for _, offset in copies]},
    )
    return copies


def close(cursor: extensions.cursor, sink: str, identities: Sequence[str], resolution: str | None = None) -> None:
    """Close letters in the caller's transaction. Without ``resolution`` their events are applied or in the base.

    All code that closes letters calls this function.
    """
    if identities:
        cursor.execute(CLOSE, {"sink": sink, "identities": list(identities), "resolution": resolution})


def discard(cursor: extensions.cursor, sink: str, identities: Sequence[str], because: str) -> int:
    """Give up open letters in the caller's transaction, and return how many. A letter is discarded here only."""
    cursor.execute(DISCARD, {"sink": sink, "identities": list(identities), "resolution": because})
    return cursor.rowcount


def begin_retry(cursor: extensions.cursor, sink: str, identities: Sequence[str], expected: Rejection) -> None:
    """Count a retry of open letters before it begins, in a transaction of its own. ``expected`` is why they are open if
    the retry never ends.
    """
    names = {"sink": sink, "identities": list(identities), **expected._asdict()}
    cursor.execute(BEGIN_RETRY, names)


def mark_replayed(cursor: extensions.cursor, sink: str, count: int) -> None:
    """Close the letters of the events that this transaction has applied: those in ``batch`` that are not in
    ``rejections``. ``batch`` has ``count`` rows at most.
    """
    cursor.execute(APPLIED_OF_BATCH, {"sink": sink, "count": count})
    close(cursor, sink, [event_id for (event_id,) in cursor])


def open_of_batch(cursor: extensions.cursor, sink: str, count: int) -> list[str]:
    """The events in ``batch``, which has ``count`` rows at most, whose letters are to be closed once they are applied:
    for a target whose events are applied in no transaction of the database.
    """
    cursor.execute(OPEN_OF_BATCH, {"sink": sink, "count": count})
    return [event_id for (event_id,) in cursor]


def mark_filtered(cursor: extensions.cursor, sink: str, count: int) -> None:
    """Close the letters of the events in ``batch`` that a transform leaves out: such an event is not applied, and is
    not set aside either. ``batch`` has ``count`` rows at most.
    """
    cursor.execute(FILTERED_OF_BATCH, {"sink": sink, "count": count})
    close(cursor, sink, [event_id for (event_id,) in cursor], FILTERED)


def update_reasons(cursor: extensions.cursor, sink: str, rejections: Mapping[str, Rejection]) -> None:
    """Write why letters are invalid now, by identity."""
    rows = [(name, *rejection) for name, rejection in sorted(rejections.items())]
    if rows:
        extras.execute_values(
            cursor, UPDATE_REASONS, rows, template=cursor.mogrify("(%s, %%s, %%s, %%s)", (sink,)).decode()
        )


def in_chunks(
    letters: Iterable[T], size_bytes: Callable[[T], int], max_bytes: int, max_count: int | None = None
) -> Iterator[list[T]]:
    """Chunks of letters, bounded in bytes and in number. A letter that is larger is a chunk of its own."""
    chunk: list[T] = []
    chunk_bytes = 0
    for letter in letters:
        own_bytes = size_bytes(letter)
        if chunk and (len(chunk) == max_count or chunk_bytes + own_bytes > max_bytes):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(letter)
        chunk_bytes += own_bytes
    if chunk:
        yield chunk


def _size_bytes(record: Record) -> int:
    parts = (record.key, record.value, *(content for _, content in record.headers))
    return sum(len(part) for part in parts if part is not None)
