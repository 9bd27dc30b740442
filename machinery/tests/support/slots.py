"""Operations of tests on a replication slot, by default that of the outbox's connector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.relay import slot
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.helpers import query


def existing(settings: Settings, connector: Connector | None = None) -> slot.Slot:
    found = slot.read(settings, connector)
    assert found is not None
    return found


def reader(settings: Settings, connector: Connector | None = None) -> int | None:
    """The server process that reads the slot; None if none does, or if there is no slot."""
    found = slot.read(settings, connector)
    return None if found is None else found.active_pid


def wait_released(settings: Settings, connector: Connector | None = None) -> None:
    wait_for("the slot to be released", lambda: reader(settings, connector) is None, timeout_s=30)


def advance(settings: Settings, connector: Connector | None = None) -> None:
    """Move the slot, which nobody reads, to the end of the log."""
    name = settings.connector if connector is None else connector.name
    query(settings, f"SELECT pg_replication_slot_advance('{name}', pg_current_wal_insert_lsn())", SourceRole.CDC)


def drop(settings: Settings) -> None:
    """Drop the slot of a connector that does not run."""
    wait_released(settings)
    query(settings, f"SELECT pg_drop_replication_slot('{settings.connector}')", SourceRole.CDC)


@contextmanager
def stopped(settings: Settings) -> Iterator[Rest]:
    """The connector does not run meanwhile, and its slot is released."""
    rest = Rest(settings)
    rest.stop()
    wait_released(settings)
    yield rest
    rest.resume()


def invalidate(settings: Settings, postgres: Postgres) -> None:
    """Let the server invalidate a slot that nobody reads, because it holds back more log than it may."""

    def is_lost() -> bool:
        postgres.psql("SELECT pg_logical_emit_message(false, 'log', ''), pg_switch_wal()")
        postgres.psql("CHECKPOINT")
        found = slot.read(settings)
        return found is not None and found.wal_status == "lost"

    postgres.psql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'")
    postgres.psql("SELECT pg_reload_conf()")
    try:
        wait_for("the slot to be invalidated", is_lost, timeout_s=30, poll_s=0.3)
    finally:
        postgres.psql("ALTER SYSTEM RESET max_slot_wal_keep_size")
        postgres.psql("SELECT pg_reload_conf()")
