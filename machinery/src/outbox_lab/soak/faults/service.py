"""The service: its workers are killed inside a request, and after a commit; and the database gives ids of the past."""

from __future__ import annotations

import random
import signal
from contextlib import closing, suppress

import psutil
import psycopg2

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import SourceRole
from outbox.base.wait import wait_for
from outbox_lab.soak.fault import A_WHILE_S, Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.testbed import Testbed

STORED = "SELECT key FROM public.idempotency_keys WHERE %s IS NULL OR expires_at > %s"
PAST = """
SELECT id::text FROM public.outbox
 WHERE uuid_extract_timestamp(id) < now() - interval '30 minutes'
   AND occurred_at > (now() AT TIME ZONE 'UTC') - interval '30 minutes'
"""
WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock' AND state = 'active'
"""


class KilledInRequest(Fault):
    """SIGKILL to the service's workers while requests are in their transactions."""

    name = "service-killed-in-request"
    parts = ("service",)
    needs = ("postgres",)

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        settings = testbed.settings
        with closing(connect(settings, SourceRole.OWNER)) as holder, holder.cursor() as cursor:
            # Each insert waits: its transaction has written the rest.
            cursor.execute("LOCK TABLE public.outbox IN SHARE MODE")
            role = settings.role_name(SourceRole.APP)

            def waiting() -> int:
                [(count,)] = testbed.superuser(WAITING, [role])
                return int(count)

            inside = wait_or_not_fired("a request in its transaction", waiting, timeout_s=30)
            killed = kill_workers(testbed)
            holder.rollback()
        return f"workers {', '.join(map(str, killed))} were killed with {inside} requests in their transactions"

    def heal(self, testbed: Testbed) -> None:
        testbed.service.start()


class KilledAfterCommit(Fault):
    """SIGKILL to the service's workers between a COMMIT and the answer to the client."""

    name = "service-killed-after-commit"
    parts = ("service", "client-service")
    needs = ("postgres", "service-postgres")

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        proxy = testbed.links["client-service"]
        proxy.hold_answers()
        [(before,)] = testbed.query("SELECT max(expires_at) FROM public.idempotency_keys")

        def committed() -> list[str]:
            held = proxy.affected  # first: each of these answers is that of a transaction, or of a read
            return [key for (key,) in testbed.query(STORED, [before, before])] if held else []

        keys = wait_or_not_fired("an answer that is committed and held", committed, timeout_s=60)
        killed = kill_workers(testbed)
        answers = proxy.affected
        proxy.cut()  # the answers are lost
        return (
            f"workers {', '.join(map(str, killed))} were killed; {len(keys)} keys were stored, {answers} answers lost"
        )

    def heal(self, testbed: Testbed) -> None:
        testbed.links["client-service"].heal()
        testbed.service.start()


class IdsOfThePast(Fault):
    """The clock from which event ids are made goes back by an hour."""

    name = "ids-of-the-past"
    parts = ("outbox-ids",)
    needs = ("postgres",)
    lasts_s = A_WHILE_S

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        before = self._past(testbed)  # of an earlier time
        self._make_ids(testbed, "uuidv7(interval '-1 hour')")

        def written() -> int:
            with suppress(Failure, psycopg2.Error):  # a link to the database may be broken
                return len(self._past(testbed) - before)
            return 0

        count = wait_or_not_fired("events with ids of the past", written, timeout_s=60, poll_s=0.2)
        return f"{count} events have ids of an hour ago"

    def heal(self, testbed: Testbed) -> None:
        self._make_ids(testbed, "uuidv7()")

    @staticmethod
    def _past(testbed: Testbed) -> set[str]:
        return {event_id for (event_id,) in testbed.query(PAST)}

    @staticmethod
    def _make_ids(testbed: Testbed, default: str) -> None:
        def altered() -> bool:
            with suppress(Failure, psycopg2.Error):
                testbed.query(f"ALTER TABLE public.outbox ALTER COLUMN id SET DEFAULT {default}")
                return True
            return False

        wait_for("the default of outbox.id to be set", altered, timeout_s=120, poll_s=0.5)


def kill_workers(testbed: Testbed) -> list[int]:
    """Kill the service's workers, and return their ids. Raises NotFired if the service has no worker."""
    master = testbed.service.pid()
    workers = [] if master is None else psutil.Process(master).children()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.send_signal(signal.SIGKILL)
    if not workers:
        raise NotFired("the service had no worker")
    return [worker.pid for worker in workers]


FAULTS: list[Make] = [KilledInRequest, KilledAfterCommit, IdsOfThePast]
