"""Look at every hop of the chain, and say of each thing that is not as it should be what to do about it.

It changes nothing, and goes on behind a hop that cannot be reached. What it finds right is told too, so that a person
sees what was looked at. That nothing is lost or doubled is another question: `outbox.audit.check`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

import psycopg2

from outbox.base.database import connect as connect_database
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka import topics
from outbox.kafka.topics import Topic
from outbox.maintenance.retention import day_of
from outbox.migrations.migrate import Database, is_current, owner_engine
from outbox.relay import apply as relay
from outbox.relay import connectors, slot
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest
from outbox.sink import fence, job
from outbox.sink.positions import Offsets
from outbox.sink.repair import rebuild
from outbox.sink.spark import local_checkpoint

CLOCK_LIMIT_S = 5.0
# What a role must not have, and the one that needs it.
WIDE = {
    "rolsuper": ("is a superuser", None),
    "rolcreaterole": ("may make roles", None),
    "rolbypassrls": ("is not bound by row security", None),
    "rolreplication": ("may replicate", SourceRole.CDC),
}
POSITIONS = """
SELECT partition, next_offset, topic_id FROM positions WHERE sink = %s AND topic = %s ORDER BY partition
"""
OUTBOX_IS_WRITE_ONLY = ("SELECT", "UPDATE", "DELETE", "TRUNCATE")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: all right if there is no remedy."""

    hop: str
    text: str
    remedy: str | None = None

    @property
    def is_well(self) -> bool:
        """Nothing has to be done."""
        return self.remedy is None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "is_well": self.is_well}


Look = Callable[[Settings], Iterator[Finding]]


def examine(settings: Settings) -> Iterator[Finding]:
    """Every hop in the order of an event's way. A hop that cannot be reached is a finding like any other."""
    for hop, look in HOPS.items():
        try:
            yield from (Finding(hop, found.text, found.remedy) for found in look(settings))
        except Failure as failure:
            yield Finding(hop, failure.message, failure.remedy or "see the message")
        except psycopg2.Error as error:
            yield Finding(hop, str(error).strip().splitlines()[0], "`outbox migrate`, then again")


def _well(text: str) -> Finding:
    return Finding("", text)


def _wrong(text: str, remedy: str) -> Finding:
    return Finding("", text, remedy)


# Databases ---------------------------------------------------------------------------------------------------------


def _ledger(settings: Settings) -> Iterator[Finding]:
    yield from _logins(settings, *SourceRole)
    yield from _schema(settings, "source")
    yield from _narrow(settings, SourceRole.AUDITOR, *SourceRole)
    ((wal_level,),) = _rows(settings, SourceRole.AUDITOR, "SHOW wal_level")
    if wal_level == "logical":
        yield _well("wal_level is logical")
    else:
        yield _wrong(f"wal_level is {wal_level}", "set it to logical (outbox/stack/postgres.conf) and restart Postgres")
    app = settings.role_name(SourceRole.APP)
    query = "SELECT privilege FROM unnest(%s) AS privilege WHERE has_table_privilege(%s, 'outbox', privilege)"
    extra = ", ".join(name for (name,) in _rows(settings, SourceRole.OWNER, query, [*OUTBOX_IS_WRITE_ONLY], app))
    if extra:
        yield _wrong(f"{app} may {extra} events", f"REVOKE {extra} ON outbox FROM {app}")
    else:
        yield _well(f"{app} may write events, and neither read nor change them")


def _balances(settings: Settings) -> Iterator[Finding]:
    yield from _logins(settings, *SinkRole)
    yield from _schema(settings, "sink")
    yield from _narrow(settings, SinkRole.AUDITOR, *SinkRole)


def _logins(settings: Settings, *roles: SourceRole | SinkRole) -> Iterator[Finding]:
    """Each role by itself: a wrong password is not found as another."""
    refused = []
    for role in roles:
        try:
            connect_database(settings, role).close()
        except Failure as failure:
            refused.append(failure)
            yield _wrong(failure.message, failure.remedy or "see the message")
    if len(refused) == len(roles):
        raise Failure("no role can log in", "see above")
    if not refused:
        yield _well(f"{len(roles)} roles can log in")


def _schema(settings: Settings, database: Database) -> Iterator[Finding]:
    with owner_engine(settings, database).connect() as connection:
        current = is_current(connection, database)
    if current:
        yield _well("the schema has every migration")
    else:
        yield _wrong("the schema is behind this code", "`outbox migrate`")


def _narrow(settings: Settings, as_role: SourceRole | SinkRole, *roles: SourceRole | SinkRole) -> Iterator[Finding]:
    names = {settings.role_name(role): role for role in roles}
    found = _rows(
        settings, as_role, f"SELECT rolname, {', '.join(WIDE)} FROM pg_roles WHERE rolname = ANY(%s)", [*names]
    )  # noqa: S608
    too_wide = False
    for name, *attributes in found:
        for has, (attribute, (meaning, needed_by)) in zip(attributes, WIDE.items(), strict=True):
            if has and (needed_by is None or needed_by is not names[name]):
                too_wide = True
                yield _wrong(f"role {name} {meaning}", f"ALTER ROLE {name} NO{attribute.removeprefix('rol').upper()}")
    if not too_wide:
        yield _well("no role has more than it needs")


# Relay -------------------------------------------------------------------------------------------------------------


def _slot(settings: Settings) -> Iterator[Finding]:
    yield from _slot_of(settings, connectors.load(settings))
    for connector in connectors.others(settings):
        if slot.read(settings, connector) is not None:  # else it is not in use
            yield from _slot_of(settings, connector)


def _slot_of(settings: Settings, connector: Connector) -> Iterator[Finding]:
    slot.require_publication(settings, connector)
    yield _well(
        f"the publication holds the {connector.table[1]} table's {'inserts' if connector.is_outbox else 'changes'}"
    )
    found, name = slot.read(settings, connector), connector.name
    if found is None:
        yield _wrong(f"there is no slot {name}: nothing is kept for the relay", f"`{connector.command('apply')}`")
        return
    if found.wal_status == "lost":
        yield _wrong(f"slot {name} was invalidated: it fell behind too far", connector.start_again)
        return
    held = f"{found.lag_bytes / 2**20:,.1f} MiB of log are held for it"
    if found.active_pid is None:
        remedy = f"`{connector.command('status')}`, and the worker's log"
        if not connector.is_outbox:
            remedy += f"; if it is not wanted any more, `{connector.command('remove')} --drop-slot`"
        yield _wrong(f"nobody reads slot {name}; {held}", remedy)
    else:
        yield _well(f"slot {name} is being read; {held}")
    if found.safe_bytes is None:
        yield _wrong(
            "max_slot_wal_keep_size is not set: a slot that is forgotten fills the disk",
            "set it (outbox/stack/postgres.conf)",
        )
    elif found.wal_status != "reserved" or found.safe_bytes < found.lag_bytes:
        yield _wrong(
            f"slot {name} is {found.wal_status}, {found.safe_bytes / 2**20:,.1f} MiB from being lost",
            "let the relay catch up; raise max_slot_wal_keep_size if the disk has room",
        )
    else:
        yield _well(f"{found.safe_bytes / 2**20:,.0f} MiB more may be written before it is lost")


def _kafka(settings: Settings) -> Iterator[Finding]:
    yield from _topics_of(settings, connectors.load(settings))
    for connector in connectors.others(settings):
        if topics.exists(settings, connector.topic):  # else it was never in use
            yield from _topics_of(settings, connector)


def _topics_of(settings: Settings, connector: Connector) -> Iterator[Finding]:
    events = topics.describe(settings, connector.topic)
    yield _well(f"topic {events.name} has {events.partitions} partitions")
    if events.partitions != settings.topic_partitions:
        yield _wrong(
            f"OUTBOX_TOPIC_PARTITIONS is {settings.topic_partitions}, topic {events.name} has {events.partitions}",
            "set it to what the topic has: adding partitions breaks the order of each key",
        )
    for name, _, wanted in connectors.topic_specs(settings, connector):
        found = topics.config(settings, name)
        different = {key: found.get(key) for key, value in wanted.items() if found.get(key) != value}
        for key, value in different.items():
            remedy = f"`kafka-configs --alter --topic {name} --add-config {key}={wanted[key]}`, or correct the setting"
            yield _wrong(f"topic {name} has {key}={value}, not {wanted[key]}", remedy)
        if not different:
            yield _well(f"topic {name} is configured as we make it")


def _connector(settings: Settings) -> Iterator[Finding]:
    yield from _connector_of(settings, connectors.load(settings), "it")
    for connector in connectors.others(settings):
        if Rest(settings, connector).config() is not None:  # else it is not in use
            yield from _connector_of(settings, connector, connector.name)


def _connector_of(settings: Settings, connector: Connector, it: str) -> Iterator[Finding]:
    found, again = relay.status(settings, connector), f"`{connector.command('apply')}`"
    if found.error:
        yield _wrong(f"{it} failed: {found.error}", f"mend that, then {again}")
        return
    if not found.is_running:
        yield _wrong(f"{it} is {found.connector}, its tasks {found.tasks or 'none'}", again)
        return
    reader = slot.read(settings, connector)
    if reader is not None and reader.active_pid is None:
        yield _wrong(
            f"the task of {connector.name} says RUNNING and reads nothing", f"see the worker's log, then {again}"
        )
    else:
        yield _well(f"{connector.name} and its task are running")
    if found.mode.startswith("exactly-once") is settings.exactly_once:
        yield _well(f"in force is {found.mode}")
    else:
        yield _wrong(
            f"in force is {found.mode}, OUTBOX_EXACTLY_ONCE is {settings.exactly_once}",
            "set exactly.once.source.support of the worker (`outbox up` switches the embedded one), then " + again,
        )


# Sinks -------------------------------------------------------------------------------------------------------------


def _sinks(settings: Settings) -> Iterator[Finding]:
    topics.describe(settings, settings.topic)  # Kafka is there, whatever sinks there are
    sinks = dict(_rows(settings, SinkRole.AUDITOR, "SELECT name, generation FROM sinks ORDER BY name"))
    if not sinks:
        yield _well("none has ever run")
    of = {name: job.topic_of(settings, name) for name in sinks}
    marks = {topic: topics.watermarks(settings, topic) for topic in {*of.values()}}
    for name, topic in of.items():
        # Before the positions are read, which a running sink moves first.
        checkpoint = local_checkpoint.uri(settings, name, sinks[name])
        folder = local_checkpoint.folder(checkpoint)
        committed = None if folder is None else local_checkpoint.committed(folder, topic)
        stored = _rows(settings, SinkRole.AUDITOR, POSITIONS, name, topic)
        yield from _sink(settings, name, topics.describe(settings, topic), marks[topic], stored)
        if folder is None:
            yield _well(f"sink {name} keeps its checkpoint at {checkpoint}, where nobody has looked")
        elif committed is None:
            yield _well(f"sink {name} has no checkpoint in {folder}: without one it begins as its strategy does")
        else:
            yield from _checkpoint(name, {partition: offset for partition, offset, _ in stored}, committed)


def _sink(
    settings: Settings, name: str, topic: Topic, marks: Mapping[int, tuple[int, int]], stored: Sequence[tuple[Any, ...]]
) -> Iterator[Finding]:
    lag = 0
    for partition, next_offset, of_topic in stored:
        first, last = marks.get(partition, (0, 0))
        if of_topic != topic.id or next_offset > last:
            yield _wrong(
                f"sink {name} is at offset {next_offset} of partition {partition}, which the topic does not have: it "
                "was made again",
                "compare with `outbox check`; to accept it, delete the sink's rows in `positions` and its checkpoint",
            )
        elif next_offset < first:
            yield _wrong(
                f"sink {name} has not applied offsets {next_offset} to {first - 1} of partition {partition}, and the "
                "topic has dropped them",
                f"`outbox check` tells what is missing, `outbox rebuild --sink {name} --from ledger` brings it",
            )
        else:
            lag += last - next_offset
    with closing(connect_database(settings, SinkRole.AUDITOR)) as connection, connection.cursor() as cursor:
        driver = fence.driver(cursor, name)
    if stored and driver is None and name.endswith(rebuild.SUFFIX):
        sink = name.removesuffix(rebuild.SUFFIX)
        yield _wrong(
            f"{name} is a copy that was never swapped in", f"`outbox rebuild --sink {sink} --from topic`, or --forget"
        )
    elif stored and driver is None:
        yield _wrong(f"sink {name} has no driver; it is {lag} offsets behind", f"`outbox sink --strategy {name}`")
    elif stored:
        yield _well(f"sink {name} runs, {lag} offsets behind")
    query = "SELECT count(*) FROM dead_letters WHERE sink = %s AND status = 'open'"
    ((parked,),) = _rows(settings, SinkRole.AUDITOR, query, name)
    if parked:
        yield _wrong(f"sink {name} has set {parked} events aside", f"`outbox dead-letters list --sink {name}`")


def _checkpoint(name: str, stored: Offsets, committed: Offsets) -> Iterator[Finding]:
    ahead = {partition: offset for partition, offset in committed.items() if offset > stored.get(partition, 0)}
    for partition, offset in sorted(ahead.items()):
        yield _wrong(
            f"sink {name} would go on at offset {offset} of partition {partition} by its checkpoint, and its database "
            f"is at {stored.get(partition, 0)}: it is older than the checkpoint",
            f"`outbox rewind --sink {name} --to-positions`",
        )
    if not ahead:
        yield _well(f"the checkpoint of sink {name} is not ahead of its database")


def _retention(settings: Settings) -> Iterator[Finding]:
    """Which days could be dropped is not judged: it takes reading the topic."""
    ((floor,),) = _rows(settings, SinkRole.AUDITOR, "SELECT horizon FROM dedup_horizon")
    ((days, size),) = _rows(settings, SinkRole.AUDITOR, "SELECT count(*), coalesce(sum(bytes), 0) FROM processed_days")
    yield _well(f"processed_events has {days} days, {size / 2**20:,.1f} MiB; its floor is {day_of(UUID(floor))}")
    query = "SELECT id FROM outbox WHERE uuid_extract_version(id) = 7 ORDER BY id LIMIT 1"
    oldest = _rows(settings, SourceRole.AUDITOR, query)
    if oldest and UUID(oldest[0][0]) < UUID(floor):
        yield _wrong(
            f"the outbox has events from below the floor, the oldest of {day_of(UUID(oldest[0][0]))}: sent again, they "
            "would be set aside",
            "prune them once they are relayed; do not use `connect remove --drop-slot` before",
        )
    if topics.config(settings, settings.topic).get("retention.ms") == "-1":
        yield _wrong(
            f"topic {settings.topic} keeps its events for ever, so processed_events can never shrink",
            f"`kafka-configs --alter --topic {settings.topic} --add-config retention.ms=…`",
        )


def _clocks(settings: Settings) -> Iterator[Finding]:
    for role in (SourceRole.AUDITOR, SinkRole.AUDITOR):
        before_s = time.time()
        ((there,),) = _rows(settings, role, "SELECT extract(epoch FROM clock_timestamp())::float8")
        # Its clock was read somewhere between ours before and ours now.
        ahead_s = max(there - time.time(), before_s - there, 0.0)
        where = settings.dsn(role)["dbname"]
        if ahead_s > CLOCK_LIMIT_S:
            yield _wrong(f"the clock of database {where} is {ahead_s:.0f} s off ours", "run NTP on both")
        else:
            yield _well(f"the clock of database {where} agrees with ours")


def _rows(settings: Settings, role: SourceRole | SinkRole, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    with closing(connect_database(settings, role)) as connection, connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return list(cursor.fetchall())


HOPS: dict[str, Look] = {
    "ledger": _ledger,
    "slot": _slot,
    "connector": _connector,
    "kafka": _kafka,
    "balances": _balances,
    "sinks": _sinks,
    "retention": _retention,
    "clocks": _clocks,
}
