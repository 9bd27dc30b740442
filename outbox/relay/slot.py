"""The replication slot and the publication that the connector reads the log through: what Debezium would not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psycopg2
from psycopg2 import sql

from outbox.base.database import connect, told
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.relay import arrivals, connectors
from outbox.relay.connectors import Connector

ARRIVE_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Slot:
    """The slot as the server sees it. Positions in the log are bytes since its beginning."""

    confirmed_lsn: int  # everything that was committed before it is confirmed as relayed
    wal_status: str  # reserved, extended, unreserved or lost
    active_pid: int | None  # the server's process that somebody reads it with
    lag_bytes: int  # log that is held back for it
    safe_bytes: int | None  # how much more log may be written before it is lost; None: no limit is set


def read(settings: Settings, connector: Connector | None = None) -> Slot | None:
    """Look the slot of a connector up; None if there is none."""
    connector = connector or connectors.load(settings)
    with _cdc(settings) as cursor:
        cursor.execute(
            "SELECT coalesce(confirmed_flush_lsn - '0/0', 0), wal_status, active_pid,"
            " coalesce(pg_current_wal_lsn() - restart_lsn, 0), safe_wal_size"
            "  FROM pg_replication_slots WHERE slot_name = %s",
            [connector.name],
        )
        row = cursor.fetchone()
    if row is None:
        return None
    confirmed, wal_status, active_pid, lag, safe = row
    return Slot(int(confirmed), wal_status, active_pid, int(lag), None if safe is None else int(safe))


def end_of_log(settings: Settings) -> int:
    """Where the log ends: whatever was committed by now lies before it."""
    with _cdc(settings) as cursor:
        cursor.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
        return int((cursor.fetchone() or (0,))[0])


def require_publication(settings: Settings, connector: Connector | None = None) -> None:
    """Without its publication a slot skips every change, with no more than a warning in the server's log.

    Raises Failure if there is none of the table, or if it lets go of inserts; or, but for the outbox, of any change.
    """
    connector = connector or connectors.load(settings)
    schema, table = connector.table
    with _cdc(settings) as cursor:
        cursor.execute(
            "SELECT pubinsert, pubupdate AND pubdelete FROM pg_publication JOIN pg_publication_tables USING (pubname)"
            " WHERE pubname = %s AND schemaname = %s AND tablename = %s AND rowfilter IS NULL",
            [connector.publication, schema, table],
        )
        row = cursor.fetchone()
    is_whole = row is not None and row[0] and (row[1] or connector.is_outbox)
    if not is_whole:
        raise Failure(
            f"database {settings.source_db_name} has no publication {connector.publication} of the {table} table",
            "`outbox migrate`" if connector.is_outbox else connector.start_again,
        )


def publish(settings: Settings, connector: Connector) -> None:
    """Make the publication of a captured table, unless it is there, and let Debezium's role read the table.

    As the owner, and on demand: who does not capture the table, need not let Debezium's role read it. A publication
    that is there is left as it is: what a wrong one did not let pass is missing, and to correct it now would hide that.
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
    """Undo what ``publish`` did. The slot must be gone: it would skip every change from then on."""
    cdc = sql.Identifier(settings.role_name(SourceRole.CDC))
    schema, table = connector.table
    with _owning(settings, connector) as cursor:
        cursor.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(connector.publication)))
        cursor.execute("SELECT FROM pg_publication_tables WHERE schemaname = %s AND tablename = %s", [schema, table])
        if not cursor.rowcount:  # a connector of another name may still capture it
            cursor.execute(sql.SQL("REVOKE SELECT ON {} FROM {}").format(sql.Identifier(schema, table), cdc))


def require_continuity(
    settings: Settings, stored_offset: Callable[[], int | None], connector: Connector | None = None
) -> None:
    """The slot must hold everything behind the stored offset; else what lies between is lost to the topic.

    A slot that stands further than the stored offset was recreated or read by somebody else; or Debezium runs without
    exactly-once, when it confirms what Kafka has acknowledged before Connect stores it. Of the outbox the topic can
    tell; a captured table does not keep what it was, so of that one nobody can. Raises Failure if the slot has, or may
    have, let go of events.
    """
    connector = connector or connectors.load(settings)
    slot = read(settings, connector)  # before the stored offset, which moves on ahead of it
    stored_lsn = stored_offset()
    if stored_lsn is None:
        return
    again = connector.start_again
    if slot is None:
        raise Failure(
            f"the replication slot {connector.name} is gone; events since {lsn(stored_lsn)} are not in it", again
        )
    if slot.wal_status == "lost":
        raise Failure(f"the replication slot {connector.name} was invalidated (it fell behind too far)", again)
    if slot.confirmed_lsn > stored_lsn and not (
        connector.is_outbox and arrivals.all_arrive(settings, ARRIVE_TIMEOUT_S)
    ):
        missing = "and the topic has not got all events" if connector.is_outbox else "and what came between is unknown"
        raise Failure(
            f"the replication slot {connector.name} is at {lsn(slot.confirmed_lsn)}, ahead of the stored offset"
            f" {lsn(stored_lsn)}, {missing}: it was recreated or read by another",
            again,
        )


def drop(settings: Settings, connector: Connector) -> None:
    """Drop the slot once nobody reads it any more. Raises WaitTimeoutError if somebody goes on reading."""

    def dropped() -> bool:
        with _cdc(settings) as cursor:
            cursor.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s AND NOT active",
                [connector.name],
            )
        return read(settings, connector) is None

    wait_for(f"slot {connector.name} to be let go of", dropped, timeout_s=RELEASE_TIMEOUT_S)


@contextmanager
def _cdc(settings: Settings) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor as Debezium's role, which thereby is seen to be able to log in."""
    connection = connect(settings, SourceRole.CDC)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


@contextmanager
def _owning(settings: Settings, connector: Connector) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor of one transaction as the owner of the captured table."""
    with closing(connect(settings, SourceRole.OWNER)) as connection:
        what = f"does not let {'.'.join(connector.table)} be captured"
        again = f"`{connector.command('apply')}`"
        with told(connection, f"connector {connector.name}", what, again), connection, connection.cursor() as cursor:
            yield cursor


def lsn(position: int) -> str:
    """A position in the log as Postgres writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
