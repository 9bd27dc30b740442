"""Look at every hop of the chain, and say what to do about each problem.

It changes nothing, and continues after a hop that is unavailable. `HOPS` lists what it looks at. Whether events are
lost or duplicated is another question: `outbox.audit.check`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID

import psycopg2
from sqlalchemy.exc import DBAPIError

from outbox.audit.sinks import UNDECLARED
from outbox.audit.source import AGAIN, snapshot
from outbox.base.database import connect, reason_of
from outbox.base.errors import Failure, plural
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events import catalog
from outbox.kafka import topics
from outbox.kafka.topics import Topic
from outbox.migrations import declared
from outbox.migrations.grants import Database
from outbox.migrations.migrate import damages, is_current, owner_engine, require_server
from outbox.relay import connectors, lifecycle, offsets, slot
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest
from outbox.sink import discovery
from outbox.sink.decoding.values import day_of
from outbox.sink.remembering import asked, fence, positions
from outbox.sink.spec import SinkSpec

MIB = 2**20
ALTER = "`kafka-configs --alter --topic {} --add-config {}`"
DATED_BY, BY_BROKER = "message.timestamp.type", "LogAppendTime"
# Attributes that no role of ours has, and the one role that needs one.
WIDE = {
    "rolsuper": ("is a superuser", None),
    "rolcreaterole": ("may create roles", None),
    "rolbypassrls": ("bypasses row security", SourceRole.CDC),  # of a captured table
    "rolreplication": ("may replicate", SourceRole.CDC),
}
ATTRIBUTES = f"SELECT rolname, {', '.join(WIDE)} FROM pg_roles WHERE rolname = ANY(%s)"  # noqa: S608
POSITIONS = (
    "SELECT topic, partition, next_offset, topic_id FROM public.positions WHERE sink = %s ORDER BY topic, partition"
)
OPEN_DEAD_LETTERS = "SELECT count(*) FROM public.dead_letters WHERE sink = %s AND status = 'open'"
# What the service may do with events beside writing them, and by a grant to whom.
READABLE = """
SELECT string_agg(privilege_type, ', ' ORDER BY privilege_type),
       CASE grantee WHEN 0 THEN 'PUBLIC' ELSE format('%%I', pg_get_userbyid(grantee)) END
  FROM pg_class, aclexplode(coalesce(relacl, acldefault('r', relowner)))
 WHERE pg_class.oid = to_regclass('public.outbox') AND privilege_type IN ('SELECT', 'UPDATE', 'DELETE', 'TRUNCATE')
   AND (grantee = 0 OR pg_has_role(%s, grantee, 'USAGE'))
   AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = %s)
 GROUP BY grantee ORDER BY 2
"""
SIZE = "SELECT count(*), coalesce(sum(pg_total_relation_size(name)), 0) FROM public.processed_partitions"
OLDEST_EVENT = "SELECT id FROM public.outbox WHERE uuid_extract_version(id) = 7 ORDER BY id LIMIT 1"


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at: a problem if it has a remedy. ``code`` is stable; the wording may change."""

    hop: str
    code: str
    message: str
    remedy: str | None = None

    @property
    def is_ok(self) -> bool:
        """Whether nothing has to be done."""
        return self.remedy is None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "is_ok": self.is_ok}


Look = Callable[[Settings], Iterator[Diagnosis]]
Marks = Mapping[int, tuple[int, int]]  # by partition, the first offset and the end


def examine(settings: Settings, *hops: str, only_outbox: bool = False) -> Iterator[Diagnosis]:
    """Examine the given hops, or all in the order of an event's way. An unavailable hop is a problem too.

    ``only_outbox`` is for a service with migrations of its own: those are all hops up to the topics.
    """
    for hop in hops or (OF_OUTBOX if only_outbox else HOPS):
        looked_at, look = HOPS[hop]
        if only_outbox and look is _source:
            look = partial(_source, target="machinery@head")
        is_ok = True
        for one in _without_failing(settings, look):
            remedy = one.remedy
            if only_outbox and remedy is not None:
                remedy = remedy.replace("`outbox migrate`", "`outbox migrate --only outbox`")
            yield replace(one, hop=hop, remedy=remedy)
            is_ok &= one.is_ok
        if is_ok:
            yield Diagnosis(hop, "ok", f"in order: {looked_at}")


def _without_failing(settings: Settings, look: Look) -> Iterator[Diagnosis]:
    try:
        yield from look(settings)
    except Failure as failure:
        yield _of_failure(failure)
    except (psycopg2.Error, DBAPIError) as error:  # of doctor itself, and of Alembic
        message = reason_of(error.orig if isinstance(error, DBAPIError) and error.orig else error)
        yield _problem("database-refused", message, f"correct the cause and {AGAIN}")


def _fact(code: str, message: str) -> Diagnosis:
    return Diagnosis("", code, message)


def _problem(code: str, message: str, remedy: str) -> Diagnosis:
    return Diagnosis("", code, message, remedy)


def _of_failure(failure: Failure) -> Diagnosis:
    return _problem(failure.code, failure.message, failure.remedy or "see the message")


# Databases ---------------------------------------------------------------------------------------------------------


def _source(settings: Settings, target: str = "heads") -> Iterator[Diagnosis]:
    """``target`` is what `outbox migrate` has upgraded the database to."""
    # Without a password the service's role is a group, whose members log in (`outbox.migrations.roles`).
    is_group = not settings.source_db_app_password.get_secret_value() and settings.db_password_command is None
    logins = [role for role in SourceRole if not (is_group and role is SourceRole.APP)]
    yield from _database(settings, "source", logins, target)
    ((wal_level,),) = _rows(settings, SourceRole.AUDITOR, "SHOW wal_level")
    if wal_level != "logical":
        remedy = "set it to logical (outbox_lab/stack/postgres.conf) and restart Postgres"
        yield _problem("wal-level-not-logical", f"wal_level is {wal_level}", remedy)
    app = settings.role_name(SourceRole.APP)
    for extra, grantee in _rows(settings, SourceRole.OWNER, READABLE, app, app):
        revoke = f"REVOKE {extra} ON public.outbox FROM {grantee}"
        if grantee == settings.role_name(SourceRole.OWNER):
            revoke = f"REVOKE {grantee} FROM {app}"
        yield _problem("outbox-readable", f"{app} may {extra} events, by a grant to {grantee}", revoke)
    yield from _declared(settings)
    for damage in damages(settings, "source"):
        yield _problem("outbox-damaged", f"the outbox is not as it was made: {damage}", "`outbox migrate`")


def _declared(settings: Settings) -> Iterator[Diagnosis]:
    """Whether the database takes every declared event."""
    with owner_engine(settings, "source").connect() as connection:
        allowed = declared.read(connection).events
    if allowed is None:
        yield _problem("events-unchecked", "the outbox takes events that are not declared", "`outbox migrate`")
    elif missing := declared.declared(settings) - allowed:
        refused = ", ".join(map(str, sorted(missing)))
        yield _problem("events-undeclared", f"the outbox refuses {refused}, which are declared", "`outbox migrate`")


def _sink_database(settings: Settings) -> Iterator[Diagnosis]:
    yield from _database(settings, "sink", list(SinkRole))
    for damage in damages(settings, "sink"):
        yield _problem("sink-db-damaged", f"the sink database is not as it was made: {damage}", "`outbox migrate`")


def _database(
    settings: Settings, database: Database, roles: Sequence[SourceRole | SinkRole], target: str = "heads"
) -> Iterator[Diagnosis]:
    """Logins, schema and rights. Each role logs in separately, so that one wrong password hides no other."""
    refused = 0
    for role in roles:
        try:
            connect(settings, role).close()
        except Failure as failure:
            refused += 1
            yield _of_failure(failure)
    if refused == len(roles):
        raise Failure("no role can log in", "see above", code="no-login")
    with owner_engine(settings, database).connect() as connection:
        require_server(connection)
        current = is_current(connection, database, target)
    if not current:
        refuses = ", or the outbox refuses declared events" if database == "source" else ""
        yield _problem("schema-behind", f"the schema lacks migrations of this code{refuses}", "`outbox migrate`")
    names = {settings.role_name(role): role for role in roles}
    for name, *attributes in _rows(settings, type(roles[0]).AUDITOR, ATTRIBUTES, [*names]):
        for has, (attribute, (meaning, needed_by)) in zip(attributes, WIDE.items(), strict=True):
            if has and (needed_by is None or needed_by is not names[name]):
                remedy = f"ALTER ROLE {name} NO{attribute.removeprefix('rol').upper()}"
                yield _problem("role-too-wide", f"role {name} {meaning}", remedy)


# Relay -------------------------------------------------------------------------------------------------------------


def _of_each(
    look: Callable[[Settings, Connector], Iterator[Diagnosis]], is_used: Callable[[Settings, Connector], object]
) -> Look:
    """A look at the connector of the outbox, and at others that are in use."""

    def look_at_all(settings: Settings) -> Iterator[Diagnosis]:
        yield from look(settings, connectors.load(settings))
        for connector in connectors.others(settings):
            if is_used(settings, connector):
                yield from look(settings, connector)

    return look_at_all


def _slot(settings: Settings, connector: Connector) -> Iterator[Diagnosis]:
    slot.require_whole_table(settings, connector)
    found, name = slot.read(settings, connector), connector.name
    if found is None:
        yield _problem("slot-missing", f"there is no slot {name}", f"`{connector.command('apply')}`")
        return
    if found.wal_status == "lost":
        yield _problem(
            "slot-invalidated", f"slot {name} was invalidated: it fell behind too far", connector.start_again
        )
        return
    held = f"{found.lag_bytes / MIB:,.1f} MiB of WAL are kept for it"
    if found.active_pid is None:
        remedy = f"`{connector.command('status')}`, and the worker's log"
        if not connector.is_outbox:
            remedy += f"; if it is not used any more, `{connector.command('remove')} --drop-slot`"
        yield _problem("slot-unread", f"nobody reads slot {name}; {held}", remedy)
    else:
        yield _fact("slot-read", f"slot {name} is being read; {held}")
    if found.safe_bytes is None:
        message = "max_slot_wal_keep_size is not set: a forgotten slot fills the disk"
        yield _problem("slot-unlimited", message, "set it (outbox_lab/stack/postgres.conf)")
    elif found.wal_status != "reserved" or found.safe_bytes < found.lag_bytes:
        message = f"slot {name} is {found.wal_status}: it is lost after {found.safe_bytes / MIB:,.1f} MiB more"
        remedy = "let the relay catch up; raise max_slot_wal_keep_size if the disk has room"
        yield _problem("slot-near-limit", message, remedy)


def _topics(settings: Settings, connector: Connector) -> Iterator[Diagnosis]:
    """Each topic of a connector. One that is missing does not hide the others."""
    specs = connectors.topic_specs(settings, connector)
    existing = topics.existing(settings, [wanted.name for wanted in specs])
    for wanted in specs:
        if wanted.name not in existing:
            message = f"there is no topic {wanted.name}; the relay stands still at the first record for it"
            yield _problem("topic-missing", message, f"`{connector.command('apply')}`")
            continue
        if wanted.name in connector.topics and wanted.partitions != (partitions := existing[wanted.name].partitions):
            message = f"topic {wanted.name} has {partitions} partitions, {wanted.partitions} are declared"
            remedy = f"set {topics.PARTITIONS_OPTION} to {partitions}: adding partitions breaks the order of each key"
            yield _problem("partitions-differ", message, remedy)
        found = topics.config(settings, wanted.name)
        for key, value in wanted.config.items():
            if found.get(key) != value:
                message = f"topic {wanted.name} has {key}={found.get(key)}, not {value}"
                remedy = f"{ALTER.format(wanted.name, f'{key}={value}')}, or correct the setting"
                yield _problem("topic-config-differs", message, remedy)
        # While a transaction hangs on its offsets, a connector relays nothing and its state is RUNNING.
        if wanted.name == connector.offsets_topic and (age_s := _open_s(settings, connector)) > offsets.END_TIMEOUT_S:
            message = f"a transaction on topic {wanted.name} is open for {age_s:.0f} s: the relay stands still"
            yield _problem("transaction-hanging", message, f"`{connector.command('apply')}`")


def _open_s(settings: Settings, connector: Connector) -> float:
    """For how many seconds a transaction is open on the offsets of a connector; 0 if none is."""
    since = offsets.open_since(settings, connector)
    return 0.0 if since is None else (datetime.now(UTC) - since).total_seconds()


def _restored(settings: Settings, connector: Connector) -> Iterator[Diagnosis]:
    """Whether the server lacks log that the connector has relayed."""
    if not topics.exists(settings, connector.offsets_topic) or _open_s(settings, connector) > offsets.END_TIMEOUT_S:
        return  # Connect would not answer; the hop kafka says why
    try:
        stored, reader = Rest(settings, connector).offset(), slot.read(settings, connector)
    except Failure as unanswered:
        if unanswered.code == "connect-unavailable":
            return  # it has just told the state: a task that cannot write holds a transaction open on the offsets
        raise
    if stored is None or reader is None or reader.wal_status == "lost":
        return
    failure = slot.restored(settings, connector, reader, stored)
    if failure is not None:
        yield _of_failure(failure)


def _connector(settings: Settings, connector: Connector) -> Iterator[Diagnosis]:
    found = lifecycle.status(settings, connector)
    if failure := lifecycle.failure_of(connector, found):
        yield _of_failure(failure)
    else:
        # Whether it transforms records as its file and the declared events say now.
        effective = connectors.transforms(Rest(settings, connector).config() or {})
        wanted = connectors.transforms(connector.config)
        differing = sorted(key for key in effective.keys() | wanted.keys() if effective.get(key) != wanted.get(key))
        if differing:
            message = f"connector {connector.name} routes otherwise than declared: {', '.join(differing)}"
            yield _problem("routes-differ", message, f"`{connector.command('apply')}`")
        if found.mode.startswith("exactly-once") is settings.exactly_once:
            yield _fact("delivery", f"the effective delivery is {found.mode}")
        else:
            message = f"the effective delivery is {found.mode}, OUTBOX_EXACTLY_ONCE is {settings.exactly_once}"
            switch = "set exactly.once.source.support of the worker (`outbox up` switches the embedded one)"
            yield _problem("delivery-differs", message, f"{switch}, then `{connector.command('apply')}`")
    yield from _restored(settings, connector)


# Sinks -------------------------------------------------------------------------------------------------------------


def _sinks(settings: Settings) -> Iterator[Diagnosis]:
    sinks = [name for (name,) in _rows(settings, SinkRole.AUDITOR, "SELECT name FROM public.sinks ORDER BY name")]
    specs = discovery.sinks(settings)
    of_sink = {name: specs.get(name.removesuffix(positions.COPY_SUFFIX)) for name in sinks}
    read = {name: found for name, found in of_sink.items() if found is not None}
    for name in (name for name in sinks if name not in read):
        yield _fact("sink-undeclared", f"sink {name} is not looked at: {UNDECLARED}")
    # Of the declared topics too, so that Kafka is looked at whatever sinks there are.
    names = {topic for found in read.values() for topic in (*found.topics, *found.target.topics)}
    names |= catalog.of_project(settings).topics.keys()
    existing = topics.existing(settings, names)
    watermarks = {name: topics.watermarks(settings, name) for name in existing}
    for name, found in read.items():
        yield from _sink(settings, found, name, {topic: (existing[topic], watermarks[topic]) for topic in existing})


def _sink(
    settings: Settings, found: SinkSpec, name: str, existing: Mapping[str, tuple[Topic, Marks]]
) -> Iterator[Diagnosis]:
    yield from _targets(settings, found, existing)
    with snapshot(settings, SinkRole.AUDITOR) as connection, connection.cursor() as cursor:
        cursor.execute(POSITIONS, [name])
        read = [row for row in cursor if row[0] in found.topics]
        cursor.execute(OPEN_DEAD_LETTERS, [name])
        ((parked,),) = cursor.fetchall()
        driver = fence.driver(cursor, name)
        failure = asked.problem(cursor, replace(found, name=name).asked)
    lag = 0
    for topic, partition, next_offset, topic_id in read:
        if topic not in existing:
            continue
        described, marks = existing[topic]
        first, last = marks.get(partition, (0, 0))
        if next_offset > last:  # a running sink has gone on meanwhile
            _, last = topics.watermarks(settings, topic).get(partition, (0, 0))
        place = f"{topic}, partition {partition}"
        if topic_id != described.id or next_offset > last:
            message = f"sink {name} is at offset {next_offset} of {place}, which the topic does not have: "
            message += "the topic was recreated"
            yield _problem("topic-recreated", message, positions.accept_remedy(name))
        elif next_offset < first:
            message = f"sink {name} has not applied offsets {next_offset} to {first - 1} of {place}, and the topic has "
            message += "dropped them"
            remedy = f"`outbox check` shows what is missing, `outbox rebuild {name} --from source` restores it"
            yield _problem("events-dropped", message, positions.remedy(name, remedy))
        else:
            lag += last - next_offset
    if read and driver is not None:
        yield _fact("sink-running", f"sink {name} is running, {lag} offsets behind")
    elif read and name.endswith(positions.COPY_SUFFIX):
        remedy = f"`outbox rebuild {name.removesuffix(positions.COPY_SUFFIX)} --from topic`, or --drop-copy"
        yield _problem("rebuild-unfinished", f"{name} is a copy that was never swapped in", remedy)
    elif read:
        message = f"sink {name} is not running; it is {lag} offsets behind"
        yield _problem("sink-not-running", message, f"`outbox sink {name}`")
    if failure is not None:  # the job asks for something else than at the sink's last start: it does not start
        yield _of_failure(failure)
    if parked:
        message = f"sink {name} has {plural(parked, 'open dead letter')}"
        yield _problem("dead-letters-open", message, f"`outbox dead-letters list --sink {name}`")


def _targets(settings: Settings, found: SinkSpec, existing: Collection[str]) -> Iterator[Diagnosis]:
    """The topics that a sink writes to. The hop kafka looks for those that sinks read."""
    for topic in found.target.topics:
        if topic not in existing:
            message = f"sink {found.name} writes to topic {topic}, which does not exist"
            yield _problem("topic-missing", message, "create it, as docs/topics.md says")
        elif (dated_by := topics.config(settings, topic).get(DATED_BY)) != BY_BROKER:
            message = (
                f"topic {topic} has {DATED_BY}={dated_by}, so sink {found.name} may write events again after a kill, "
            )
            message += "if the clock of its host is ten minutes behind"
            yield _problem("topic-config-differs", message, ALTER.format(topic, f"{DATED_BY}={BY_BROKER}"))


def _retention(settings: Settings) -> Iterator[Diagnosis]:
    """Days that could be dropped are not looked for: that takes reading the topic."""
    ((horizon,),) = _rows(settings, SinkRole.AUDITOR, "SELECT horizon FROM public.dedup_horizon")
    ((count, size),) = _rows(settings, SinkRole.AUDITOR, SIZE)
    message = f"processed_events has {count} partitions, {size / MIB:,.1f} MiB; "
    message += f"the deduplication horizon is {day_of(UUID(horizon))}"
    yield _fact("dedup-horizon", message)
    for (oldest,) in _rows(settings, SourceRole.AUDITOR, OLDEST_EVENT):
        if UUID(oldest) < UUID(horizon):
            message = f"the outbox has events older than the deduplication horizon, since {day_of(UUID(oldest))}: "
            message += "if the relay sends them again, sinks set them aside"
            remedy = "prune them once they are relayed; do not use `connect remove --drop-slot` before"
            yield _problem("outbox-older-than-horizon", message, remedy)
    for topic in topics.existing(settings, connectors.load(settings).topics):  # a missing one is a problem of hop kafka
        if topics.config(settings, topic).get("retention.ms") == "-1":
            message = f"topic {topic} keeps its events for ever, so processed_events never shrinks"
            yield _problem("topic-unlimited", message, ALTER.format(topic, "retention.ms=…"))


def _rows(settings: Settings, role: SourceRole | SinkRole, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    with snapshot(settings, role) as connection, connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return list(cursor.fetchall())


# By hop, what is looked at, and how.
HOPS: dict[str, tuple[str, Look]] = {
    "source-db": ("logins, schema, rights, wal_level, declared events", _source),
    "slot": ("publication, slot, its limit", _of_each(_slot, slot.read)),
    "connector": (
        "connector and task, routes, delivery",
        _of_each(_connector, lambda settings, one: Rest(settings, one).config()),
    ),
    "kafka": (
        "topics, their partitions and configuration",
        _of_each(_topics, lambda settings, one: topics.exists(settings, one.topic)),
    ),
    "sink-db": ("logins, schema, rights", _sink_database),
    "sinks": ("drivers, positions, dead letters", _sinks),
    "retention": ("deduplication horizon, retention of topics", _retention),
}
OF_OUTBOX = ("source-db", "slot", "connector", "kafka")
