"""What tests do to the replication slot."""

from __future__ import annotations

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.relay import slot
from outbox_lab.stack.postgres import Postgres


def invalidate(settings: Settings, postgres: Postgres) -> None:
    """Let the server invalidate a slot that nobody reads.

    For real that takes gigabytes of log (max_slot_wal_keep_size); a slot idle for too long ends the same way.
    """

    def is_lost() -> bool:
        postgres.psql("CHECKPOINT")
        found = slot.read(settings)
        return found is not None and found.wal_status == "lost"

    postgres.psql("ALTER SYSTEM SET idle_replication_slot_timeout = '1s'")
    postgres.psql("SELECT pg_reload_conf()")
    try:
        wait_for("the slot to be invalidated", is_lost, timeout_s=30, poll_s=0.3)
    finally:
        postgres.psql("ALTER SYSTEM RESET idle_replication_slot_timeout")
        postgres.psql("SELECT pg_reload_conf()")
