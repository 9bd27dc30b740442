"""The replication slot and the publication that the connector reads the log through: what Debezium would not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg2

from outbox import check
from outbox.database import connect
from outbox.errors import Failure
from outbox.settings import LedgerRole, Settings
from outbox.wait import WaitTimeoutError, wait_for

PUBLICATION = "outbox"
ARRIVE_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 60.0
FORGET = "`outbox connect remove --forget`, then `apply`: the whole outbox table again; idempotent sinks skip it"


@dataclass(frozen=True)
class Slot:
    """The slot as the server sees it. Positions in the log are bytes since its beginning."""

    confirmed_lsn: int  # everything that was committed before it is confirmed as relayed
    wal_status: str  # reserved, extended, unreserved or lost
    active_pid: int | None  # the server's process that somebody reads it with
    lag_bytes: int  # log that is held back for it
    safe_bytes: int | None  # how much more log may be written before it is lost; None: no limit is set


def read(settings: Settings) -> Slot | None:
    """Look the slot up; None if there is none."""
    with _cdc(settings) as cursor:
        cursor.execute(
            "SELECT coalesce(confirmed_flush_lsn - '0/0', 0), wal_status, active_pid,"
            " coalesce(pg_current_wal_lsn() - restart_lsn, 0), safe_wal_size"
            "  FROM pg_replication_slots WHERE slot_name = %s",
            [settings.connector],
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


def require_publication(settings: Settings) -> None:
    """Without its publication a slot skips every change, with no more than a warning in the server's log.

    Raises Failure if there is none of the outbox table's inserts.
    """
    with _cdc(settings) as cursor:
        cursor.execute(
            "SELECT pubinsert FROM pg_publication JOIN pg_publication_tables USING (pubname)"
            " WHERE pubname = %s AND schemaname = 'public' AND tablename = 'outbox'",
            [PUBLICATION],
        )
        row = cursor.fetchone()
    if row is None or not row[0]:
        raise Failure(
            f"database {settings.ledger_dbname} has no publication {PUBLICATION} of the outbox table",
            "`outbox migrate`",
        )


def require_continuity(settings: Settings, stored_offset: Callable[[], int | None]) -> None:
    """The slot must hold everything behind the stored offset; else what lies between is lost to the topic.

    A slot that stands further than the stored offset was recreated or read by somebody else; or Debezium runs without
    exactly-once, when it confirms what Kafka has acknowledged before Connect stores it. Only the topic can tell.
    Raises Failure if the slot has let go of events.
    """
    slot = read(settings)  # before the stored offset, which moves on ahead of it
    stored_lsn = stored_offset()
    if stored_lsn is None:
        return
    if slot is None:
        raise Failure(
            f"the replication slot {settings.connector} is gone; events since {lsn(stored_lsn)} are not in it", FORGET
        )
    if slot.wal_status == "lost":
        raise Failure(f"the replication slot {settings.connector} was invalidated (it fell behind too far)", FORGET)
    if slot.confirmed_lsn > stored_lsn and not _all_arrives(settings):
        raise Failure(
            f"the replication slot {settings.connector} is at {lsn(slot.confirmed_lsn)}, ahead of the stored offset"
            f" {lsn(stored_lsn)}, and the topic has not got all events: it was recreated or read by another",
            FORGET,
        )


def drop(settings: Settings) -> None:
    """Drop the slot once nobody reads it any more. Raises WaitTimeoutError if somebody goes on reading."""

    def dropped() -> bool:
        with _cdc(settings) as cursor:
            cursor.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE slot_name = %s AND NOT active",
                [settings.connector],
            )
        return read(settings) is None

    wait_for(f"slot {settings.connector} to be let go of", dropped, timeout_s=RELEASE_TIMEOUT_S)


def _all_arrives(settings: Settings) -> bool:
    """Whether all that the outbox holds now comes onto the topic, for which a running connector is given some time."""
    missing: list[frozenset[str]] = []

    def arrived() -> bool:
        missing.append(check.unrelayed(settings))
        return not frozenset.intersection(*missing)

    try:
        return wait_for("the outbox to be on the topic", arrived, timeout_s=ARRIVE_TIMEOUT_S, poll_s=0.5)
    except WaitTimeoutError:
        return False


@contextmanager
def _cdc(settings: Settings) -> Iterator[psycopg2.extensions.cursor]:
    """A cursor as Debezium's role, which thereby is seen to be able to log in."""
    connection = connect(settings, LedgerRole.CDC)
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


def lsn(position: int) -> str:
    """A position in the log as Postgres writes it."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"
