"""The replication slot and the publication of a connector: the checks that Debezium does not make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg2
from psycopg2 import sql

from outbox.base.database import connected
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.migrations import publication
from outbox.relay import arrivals, connectors
from outbox.relay.connectors import Config, Connector
from outbox.relay.rest import Offset

ARRIVE_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 60.0
CLOCK_STEP_US = 5_000_000  # a clock may be set back by less, and no restore of a server is faster
SLOT = """
SELECT coalesce(confirmed_flush_lsn - '0/0', 0)::bigint, coalesce(restart_lsn - '0/0', 0)::bigint, wal_status,
       active_pid, coalesce(pg_current_wal_lsn() - restart_lsn, 0)::bigint, safe_wal_size
  FROM pg_replication_slots WHERE slot_name = %s
"""
HIDDEN = "SELECT row_security_active(to_regclass(format('%%I.%%I', %s, %s)))"

# The newest commit that a slot holds before a position, in microseconds since 2000: in the message that begins each
# transaction (https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html). Moves nothing.
NEWEST_COMMIT = """
SELECT max(('x' || encode(substring(data FROM 10 FOR 8), 'hex'))::bit(64)::bigint)
  FROM pg_logical_slot_peek_binary_changes(%s, %s, NULL, 'proto_version', '1', 'publication_names', %s)
 WHERE get_byte(data, 0) = ascii('B')
"""
EPOCH_US = 946_684_800_000_000  # from 1970 to 2000


@dataclass(frozen=True)
class Slot:
    """The slot as the server sees it. Positions in the write-ahead log are bytes since its beginning."""

    confirmed_lsn: int  # everything committed before it is confirmed as relayed
    restart_lsn: int  # the oldest log that the server retains for it
    wal_status: str  # reserved, extended, unreserved or lost
    active_pid: int | None  # the server process that reads it for a client
    lag_bytes: int  # log that the server retains for it
    safe_bytes: int | None  # log that may still be written before the slot is lost; None: no limit is set


def read(settings: Settings, connector: Connector | None = None) -> Slot | None:
    """Look up the slot of a connector; None if it does not exist."""
    connector = connector or connectors.load(settings)
    with _cdc(settings) as cursor:
        cursor.execute(SLOT, [connector.name])
        row = cursor.fetchone()
    return None if row is None else Slot(*row)


def end_of_log(settings: Settings) -> int:
    """The end of the write-ahead log: everything committed by now lies before it."""
    with _cdc(settings) as cursor:
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
        return int((cursor.fetchone() or (0,))[0])


def require_whole_table(settings: Settings, connector: Connector) -> None:
    """Check that Debezium gets each row of the table, from the log by the publication and in a snapshot.

    Raises Failure `publication-wrong` if the publication is missing or leaves out something, and `rows-hidden` if
    policies may hide rows from Debezium's role.
    """
    schema, table = connector.table
    with _cdc(settings) as cursor:
        wrong = publication.problem(cursor, connector.publication, schema, table, is_outbox=connector.is_outbox)
        cursor.execute(HIDDEN, [schema, table])
        row = cursor.fetchone()
    if wrong:
        raise Failure(
            f"database {settings.source_db_url.name}: the publication {connector.publication} {wrong}",
            "`outbox migrate`" if connector.is_outbox else connector.start_again,
            code="publication-wrong",
        )
    if row is not None and row[0]:
        role = settings.role_name(SourceRole.CDC)
        remedy = f"ALTER TABLE {schema}.{table} DISABLE ROW LEVEL SECURITY"
        if not connector.is_outbox:
            remedy = f"ALTER ROLE {role} BYPASSRLS"
        raise Failure(
            f"database {settings.source_db_url.name}: row-level security of {schema}.{table} may hide rows from {role}",
            remedy,
            code="rows-hidden",
        )


def publish(settings: Settings, connector: Connector) -> None:
    """Create the publication of a captured table unless it exists, and let Debezium's role read the table.

    It is created on demand, so that Debezium's role may read only tables that are captured. An existing publication is
    not changed: the changes that a wrong one did not publish are missing, and a correction would hide that.
    """
    schema, table = connector.table
    names = {
        "publication": sql.Identifier(connector.publication),
        "table": sql.Identifier(schema, table),
        "cdc": sql.Identifier(settings.role_name(SourceRole.CDC)),
    }
    with _owning(settings, connector) as cursor:
        cursor.execute("SELECT FROM pg_publication WHERE pubname = %s", [connector.publication])
        if not cursor.rowcount:
            make = "CREATE PUBLICATION {publication} FOR TABLE {table} WITH (publish = 'insert, update, delete')"
            cursor.execute(sql.SQL(make).format(**names))
        cursor.execute(sql.SQL("GRANT SELECT ON {table} TO {cdc}").format(**names))


def unpublish(settings: Settings, connector: Connector) -> None:
    """Undo ``publish``. The slot must be dropped before: it would skip every later change."""
    cdc = sql.Identifier(settings.role_name(SourceRole.CDC))
    schema, table = connector.table
    with _owning(settings, connector) as cursor:
        cursor.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(connector.publication)))
        cursor.execute("SELECT FROM pg_publication_tables WHERE schemaname = %s AND tablename = %s", [schema, table])
        if not cursor.rowcount:  # otherwise a connector with another name still captures it
            cursor.execute(sql.SQL("REVOKE SELECT ON {} FROM {}").format(sql.Identifier(schema, table), cdc))


def require_continuity(
    settings: Settings,
    stored_offset: Callable[[], Offset | None],
    connector: Connector | None = None,
    effective: Config | None = None,
) -> None:
    """Check that the slot still has everything after the stored offset; otherwise the topic misses events.

    A slot ahead of the stored offset was recreated, or another client read it. Debezium without exactly-once leaves
    one too: it confirms acknowledged records before Connect stores their offset. For the outbox, a comparison with its
    topics decides; and with those of the ``effective`` configuration, from which an aggregate may be about to move. A
    captured table keeps no history, so nothing can decide. Raises Failure if events are, or may be, missing, if
    Debezium would refuse the offset because the server no longer retains the log that follows it, and if the server was
    restored to a state before the offset (`restored`).
    """
    connector = connector or connectors.load(settings)
    slot = read(settings, connector)  # before the stored offset, which advances first
    stored = stored_offset()
    if stored is None:
        return
    stored_lsn = stored.lsn
    again = connector.start_again
    if slot is None:
        raise Failure(
            f"the replication slot {connector.name} does not exist; events since {lsn(stored_lsn)} are not in it",
            again,
            code="slot-missing",
        )
    if slot.wal_status == "lost":
        raise Failure(
            f"the replication slot {connector.name} was invalidated (it fell too far behind)",
            again,
            code="slot-invalidated",
        )
    failure = restored(settings, connector, slot, stored)
    if failure is not None:
        raise failure
    is_ahead = slot.confirmed_lsn > stored_lsn
    if is_ahead and not (connector.is_outbox and _all_arrive(settings, connector, effective)):
        missing = "the topics miss events" if connector.is_outbox else "the changes in between are unknown"
        cause, remedy = "it was recreated, or another client read it", again
        if not settings.exactly_once:
            cause += ", or the relay stands still"
            remedy = f"run the command again once the relay runs; if it ends like this again: {again}"
        raise Failure(
            f"the replication slot {connector.name} is at {lsn(slot.confirmed_lsn)}, ahead of the stored offset"
            f" {lsn(stored_lsn)}, and {missing}: {cause}",
            remedy,
            code="slot-ahead",
        )
    if is_ahead and slot.restart_lsn >= stored_lsn:
        raise Failure(
            f"the replication slot {connector.name} has no log before {lsn(slot.restart_lsn)}, and Debezium does not"
            f" continue from the stored offset {lsn(stored_lsn)}; no event is missing",
            again,
            code="slot-released",
        )


def restored(settings: Settings, connector: Connector, slot: Slot, stored: Offset) -> Failure | None:
    """The failure if the server lacks log that was relayed: a snapshot of its disk was put back, for example.

    Debezium then passes over new events until the log reaches the stored offset again, and says RUNNING. Until then the
    log ends before the offset. Afterwards, while nobody reads the slot, it holds commits before the offset that are
    younger than the last event that was relayed. Once Debezium has passed over them, only `outbox check` finds them.
    """
    end = end_of_log(settings)  # read later than the offset, so never before it in a sound log
    if stored.lsn > end:
        sign = f"its log ends at {lsn(end)}, before the stored offset {lsn(stored.lsn)}"
    elif slot.active_pid is None and _holds_younger(settings, connector, stored):
        sign = f"its log has events before the stored offset {lsn(stored.lsn)} that are younger than it"
    else:
        return None
    return Failure(
        f"the server of database {settings.source_db_url.name} was restored to an earlier state, or failed over: "
        f"{sign}",
        f"{connector.start_again}; sinks keep what the source has lost until `outbox rebuild NAME --from source`",
        code="source-restored",
    )


def _holds_younger(settings: Settings, connector: Connector, stored: Offset) -> bool:
    """Whether the slot, which nobody reads, holds a commit before the offset that is younger than its last event."""
    if stored.committed_us is None:
        return False
    with _cdc(settings) as cursor:
        try:
            cursor.execute(NEWEST_COMMIT, [connector.name, lsn(stored.lsn), connector.publication])
        except (psycopg2.errors.ObjectInUse, psycopg2.errors.UndefinedObject):
            return False  # a client has begun to read it, or there was no publication for a while
        ((newest,),) = cursor.fetchall()
    return newest is not None and newest + EPOCH_US > stored.committed_us + CLOCK_STEP_US


def _all_arrive(settings: Settings, connector: Connector, effective: Config | None) -> bool:
    aggregates = catalog.of_project(settings).aggregates
    before = {connectors.topic_of(effective, aggregate) for aggregate in aggregates} if effective else set()
    names = {*connector.topics, *connectors.default_topics(settings), *before}
    return arrivals.all_arrive(settings, sorted(names), ARRIVE_TIMEOUT_S)


def drop(settings: Settings, connector: Connector) -> None:
    """Drop the slot once nobody reads it. Raises WaitTimeoutError if a client keeps reading."""

    def dropped() -> bool:
        with _cdc(settings) as cursor:
            cursor.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s AND NOT active",
                [connector.name],
            )
        return read(settings, connector) is None

    wait_for(f"slot {connector.name} to be released", dropped, timeout_s=RELEASE_TIMEOUT_S)


@contextmanager
def _cdc(settings: Settings) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor as Debezium's role; this also checks that the role can log in."""
    with connected(settings, SourceRole.CDC, "the relay's role") as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            yield cursor


@contextmanager
def _owning(settings: Settings, connector: Connector) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor of one transaction as the owner of the captured table."""
    subject = f"connector {connector.name}, which captures {'.'.join(connector.table)}"
    with connected(settings, SourceRole.OWNER, subject) as connection, connection, connection.cursor() as cursor:
        yield cursor


def lsn(position: int) -> str:
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
