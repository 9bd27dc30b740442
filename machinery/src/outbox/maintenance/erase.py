"""Erase what outbox, sinks and their tables have of one key, and keep it from coming back.

The order makes each step safe to repeat, whenever the process ends:

1. Every event of the key must be on a topic. One that is not relayed yet would be lost silently.
2. One transaction of the sink database, under the locks of all sinks: the key becomes *erased* (`erased_keys`), and its
   dead letters, landed events and rows of projections go. So no batch that began before commits afterwards, and from
   here on no delivery, replay, rewind or rebuild applies the key's events from before.
3. Targets elsewhere, each under the lock of its sink: of a lakehouse's table the rows, and the files that time travel
   has kept for them; what a target's own function erases.
4. One transaction of the source database: the outbox rows, and the stored answers that have the key. An answer becomes
   410 Gone, because a request whose answer were deleted would be carried out again.

A dry run does the same in transactions that it rolls back, and so finds what is left.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from psycopg2 import extensions, sql

from outbox.base.database import column_names, connect, connected, database_errors
from outbox.base.errors import Failure, plural
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events import catalog
from outbox.events.catalog import Aggregate
from outbox.events.schema import SqlType
from outbox.kafka import topics
from outbox.maintenance.retention import between_batches, event_topics
from outbox.relay import arrivals, slot
from outbox.sink import discovery
from outbox.sink.decoding.decoder import FUTURE_MAX_MS
from outbox.sink.remembering import fence, positions
from outbox.sink.spec import SinkSpec

AGAIN = "run the command again"
GONE = json.dumps({"type": "about:blank", "title": "Gone", "status": 410, "detail": "the answer was erased"})
OF_KEY = "WHERE aggregatetype = ANY(%(aggregates)s) AND aggregateid = %(key)s"
NOW_MS = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
VERSION = "SELECT max(version)::bigint FROM {} WHERE key::text = %s"
DELETE_EVENTS = "DELETE FROM public.outbox WHERE id = ANY(%s::uuid[])"
# An answer may be no JSON. Postgres 15 has no IS JSON, and JSON with a NUL is no jsonb.
JSON = """
CREATE OR REPLACE FUNCTION pg_temp.outbox_json(body text) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RETURN body::jsonb;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END $$
"""
# The key as a text anywhere in an answer; as a number only in a property that is called like it, or `id`.
ERASE_ANSWERS = """
UPDATE public.idempotency_keys SET status = 410, body = %(gone)s
 WHERE jsonb_path_exists(pg_temp.outbox_json(body), %(path)s, %(vars)s)
"""
PATH = "$.** ? (@ == $key || @.id == $number || @.{} == $number)"
MARK = """
INSERT INTO public.erased_keys AS known (topic, key_hash, until, version)
VALUES (%(topic)s, %(key_hash)s, %(until)s, %(version)s)
ON CONFLICT (topic, key_hash) DO UPDATE
   SET until = greatest(known.until, excluded.until), version = greatest(known.version, excluded.version),
       erased_at = now()
"""
LETTERS = "DELETE FROM public.dead_letters WHERE topic = ANY(%(topics)s) AND key = convert_to(%(key)s, 'UTF8')"
READERS = "SELECT DISTINCT sink FROM public.positions WHERE topic = %(topic)s"
# As the strategy has landed it: a job may name versions, and a transform may leave out the columns of the event.
LANDED = """
DELETE FROM public.landed_events
 WHERE sink = ANY(%(sinks)s)
   AND %(key)s = coalesce(event ->> 'outbox_key', event ->> %(name)s, event ->> %(typed_name)s)
   AND coalesce(coalesce(event ->> 'outbox_type', event ->> 'event_type') = ANY(%(events)s), true)
"""
CHANGED = "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del) FROM pg_stat_xact_user_tables"  # needs track_counts

Found = Counter[str]  # by place, how many rows


@dataclass(frozen=True)
class Subject:
    """A key on a topic. Aggregate types that share the topic share its keys."""

    aggregates: Sequence[Aggregate]
    key: str
    type_: SqlType
    sinks: Sequence[SinkSpec]  # that take its events
    files: Mapping[str, Sequence[Path]]  # by sink the files NAME.erase.sql

    @property
    def parameters(self) -> dict[str, Any]:
        names = [aggregate.name for aggregate in self.aggregates]
        return {"aggregates": names, "key": self.key, "topic": self.aggregates[0].topic}


def subject(settings: Settings, aggregate: str, key: str) -> Subject:
    """The key of an aggregate type. Raises Failure if it cannot be one, or if a projection that gets personal data does
    not say how it is erased.
    """
    known = catalog.of_project(settings)
    if aggregate not in known.aggregates:
        raise Failure(
            f"there is no aggregate type {aggregate}",
            f"there are {', '.join(known.aggregates) or 'none'} (`outbox events`)",
            code="event-undeclared",
        )
    topic, name = known.aggregates[aggregate].topic, known.aggregates[aggregate].key
    type_ = next(column.type for column in known.aggregates[aggregate].schemas[0].columns if column.name == name)
    try:
        key = str(uuid.UUID(key)) if type_ == "uuid" else str(int(key)) if type_ == "bigint" else key
    except ValueError:
        raise Failure(f"{name} of {aggregate} is of type {type_}, and the key is not", code="key-invalid") from None
    sinks = [spec for spec in discovery.sinks(settings).values() if spec.job.events and topic in spec.decoders]
    files = {spec.name: spec.erase_files(topic) for spec in sinks if not spec.target.is_elsewhere}
    return Subject(known.topics[topic], key, type_, sinks, files)


def erase(settings: Settings, one: Subject, *, dry_run: bool = False) -> Found:
    """Erase what can be erased, and return how much that was. With ``dry_run`` nothing is changed.

    Raises Failure, with nothing changed, if an event of the key is on no topic. After any other failure what is done is
    done: repeat it.
    """
    with connected(settings, SourceRole.OWNER, f"erasing in {settings.source_db_url.name}") as source:
        events = _events(settings, source, one, relayed=not dry_run)
        with source, source.cursor() as cursor:
            cursor.execute(NOW_MS)
            ((now_ms,),) = cursor.fetchall()
        # The ids of its events may be ahead of the clock, as far as sinks take them.
        ahead = [event_id for event_id in events if event_id <= _last_id(now_ms + FUTURE_MAX_MS)]
        found = _erase_in_sinks(settings, one, max([_last_id(now_ms), *ahead]), dry_run=dry_run)
        for spec in one.sinks:
            if spec.target.is_elsewhere:
                found.update(_erase_elsewhere(settings, spec, one, dry_run=dry_run))
        found.update(_erase_in_source(source, one, events, dry_run=dry_run))
    return found


def remains(settings: Settings, one: Subject) -> list[str]:
    """The places that nobody can erase, until when each has the key, and the places that were not searched."""
    written = {topic for spec in one.sinks for topic in spec.target.topics}
    lines = [_of_topic(settings, topic) for topic in topics.existing(settings, {*_topics(settings, one), *written})]
    ttl = _time(datetime.now(UTC) + timedelta(hours=settings.idempotency_ttl_hours))
    lines += [
        f"stored answers without the key: until {ttl}, and until later requests have deleted them",
        f"write-ahead logs: until slot {settings.connector} has confirmed byte {slot.end_of_log(settings)} and "
        "Postgres has reused them; pages until VACUUM; backups, archives and replicas as long as you keep them",
    ]
    lines += sorted({spec.target.keeps for spec in one.sinks} - {""})
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(READERS, one.parameters)
        known = {spec.name for spec in one.sinks if one.files.get(spec.name, True)}
        unseen = [f"tables of sink {name}" for (name,) in cursor if _declared(name) not in known]
    unseen += [f"sink {name}" for name, spec in discovery.sinks(settings).items() if not spec.job.events]
    unseen += ["tables of the service", "events of other keys", "records without the key"]
    return [*lines, f"not looked at: {', '.join(sorted(unseen))}"]


def _topics(settings: Settings, one: Subject) -> list[str]:
    """The topic of the events, and those that earlier ones may be on."""
    defaults = {f"{settings.topic_prefix}.{aggregate.name}" for aggregate in one.aggregates}
    return sorted({one.parameters["topic"]} | defaults)


def _declared(sink: str) -> str:
    return sink.removesuffix(positions.COPY_SUFFIX)


def _events(settings: Settings, source: extensions.connection, one: Subject, *, relayed: bool) -> list[str]:
    """The events of the key in the outbox. With ``relayed``, raises Failure if one of them is on no topic."""
    found = list[str]()
    with tempfile.TemporaryFile() as file:
        with source, source.cursor() as cursor:
            arrivals.copy(cursor, file, cursor.mogrify(OF_KEY, one.parameters).decode())
        for events in arrivals.chunks(settings, file):
            found += events
            if relayed and (missing := arrivals.missing(settings, events, partial(event_topics, settings))):
                raise Failure(
                    f"{plural(len(missing), 'event')} of the key on no topic, the first is {min(missing)}",
                    "nothing was erased: wait until the relay has sent them; `outbox check` finds lost ones",
                    code="events-not-on-topic",
                )
    return found


def _last_id(at_ms: int) -> str:
    """The highest id of a millisecond."""
    return str(uuid.UUID(int=(at_ms + 1 << 80) - 1))


def _version(settings: Settings, one: Subject) -> int | None:
    """The highest version of the key that the source's views know."""
    found = list[int | None]()
    with closing(connect(settings, SourceRole.AUDITOR)) as connection, connection.cursor() as cursor:
        for view in sorted({aggregate.source for aggregate in one.aggregates if aggregate.source}):
            if {"key", "version"} <= column_names(connection, view):
                cursor.execute(sql.SQL(VERSION).format(sql.Identifier("public", view)), [one.key])
                found += [version for (version,) in cursor]
    return max((version for version in found if version is not None), default=None)


def _erase_in_sinks(settings: Settings, one: Subject, until: str, *, dry_run: bool) -> Found:
    key_hash = hashlib.sha256(one.key.encode()).digest()
    mark = {**one.parameters, "key_hash": key_hash, "until": until, "version": _version(settings, one)}
    with connected(settings, SinkRole.OWNER, f"erasing in {settings.sink_db_url.name}") as connection:

        def in_turn(cursor: extensions.cursor) -> Found:
            found = _erase_rows(settings, cursor, one)
            cursor.execute(MARK, mark)
            if dry_run:
                connection.rollback()
            return found

        return between_batches(connection, fence.all_sinks, in_turn)


def _erase_rows(settings: Settings, cursor: extensions.cursor, one: Subject) -> Found:
    found: Found = Counter()
    cursor.execute(LETTERS, {**one.parameters, "topics": _topics(settings, one)})
    found["dead letters"] = cursor.rowcount
    cursor.execute(READERS, one.parameters)
    readers, name = [sink for (sink,) in cursor], one.aggregates[0].key
    schemas = [schema for aggregate in one.aggregates for schema in aggregate.schemas]
    events = [name for schema in schemas for name in (schema.event, schema.name)]
    typed_name = f"{name}:{one.type_}"
    landed = {"sinks": readers, "name": name, "typed_name": typed_name, "events": events}
    cursor.execute(LANDED, {**one.parameters, **landed})
    found["landed_events"] = cursor.rowcount
    for sink in sorted(readers):
        for file in one.files.get(_declared(sink), ()):
            before = _changed(cursor)
            if COMMENT.sub("", statements := file.read_text()).strip():
                with database_errors(cursor.connection, str(file), "refused it", AGAIN):
                    cursor.execute(statements, {"sink": sink, "key": one.key})
            found[f"{file.name} of sink {sink}"] = _changed(cursor) - before
    return found


def _changed(cursor: extensions.cursor) -> int:
    cursor.execute(CHANGED)
    ((rows,),) = cursor.fetchall()
    return int(rows)


def _erase_elsewhere(settings: Settings, spec: SinkSpec, one: Subject, *, dry_run: bool) -> Mapping[str, int]:
    with connected(settings, SinkRole.OWNER, f"erasing in {settings.sink_db_url.name}") as connection:
        with connection, connection.cursor() as cursor:
            cursor.execute(fence.SESSION)
        with fence.held(connection, spec.name):
            return spec.target.erase(settings, spec, one.parameters["topic"], one.key, dry_run=dry_run)


def _erase_in_source(source: extensions.connection, one: Subject, events: Sequence[str], *, dry_run: bool) -> Found:
    variables = {"key": one.key, "number": int(one.key) if one.type_ == "bigint" else one.key}
    path = PATH.format(json.dumps(one.aggregates[0].key))
    found: Found = Counter()
    with source, source.cursor() as cursor:
        cursor.execute(DELETE_EVENTS, [list(events)])
        found["outbox"] = cursor.rowcount
        if column_names(source, "idempotency_keys"):
            cursor.execute(JSON)
            cursor.execute(ERASE_ANSWERS, {"gone": GONE, "path": path, "vars": json.dumps(variables)})
            found["stored answers"] = cursor.rowcount
        if dry_run:
            source.rollback()
    return found


def _of_topic(settings: Settings, topic: str) -> str:
    config = topics.config(settings, topic)
    if "delete" not in config["cleanup.policy"]:
        return f"topic {topic}: until a record with the key and without a value, and the next compaction"
    if int(config["retention.ms"]) < 0:
        return f"topic {topic}: for ever, because it has no retention.ms"
    until = datetime.now(UTC) + timedelta(milliseconds=int(config["retention.ms"]) + int(config["segment.ms"]))
    return f"topic {topic}: until {_time(until)} at the latest (retention.ms and segment.ms from now)"


def _time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%MZ}"
