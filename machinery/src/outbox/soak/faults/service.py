"""The service: its workers are killed inside a request; and a database that gives ids of the past."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import closing

import psutil

from outbox.base.database import connect
from outbox.base.settings import SourceRole
from outbox.base.wait import wait_for
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed

WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock' AND state = 'active'
"""


class KilledInRequest(Fault):
    """SIGKILL to the service's workers while requests are in their transactions."""

    name = "service-killed-in-request"
    parts = ("service", "postgres")
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        settings = testbed.settings
        with closing(connect(settings, SourceRole.OWNER)) as holder, holder.cursor() as cursor:
            cursor.execute("LOCK TABLE outbox IN SHARE MODE")  # each insert waits: its transaction has written the rest
            role = settings.role_name(SourceRole.APP)

            def waiting() -> int:
                [(count,)] = testbed.superuser(WAITING, [role])
                return int(count)

            try:
                inside = wait_for("a request in its transaction", waiting, timeout_s=30)
            except TimeoutError as error:
                raise NotFired(str(error)) from error
            killed = [one.pid for one in self._workers(testbed)]
            for process in self._workers(testbed):
                process.send_signal(signal.SIGKILL)
            holder.rollback()
        if not killed:
            raise NotFired("the service had no worker")
        return f"workers {', '.join(map(str, killed))} were killed with {inside} requests in their transactions"

    def heal(self, testbed: Testbed) -> None:
        testbed.service.start()

    @staticmethod
    def _workers(testbed: Testbed) -> list[psutil.Process]:
        master = testbed.service.pid()
        return [] if master is None else psutil.Process(master).children()


class IdsOfThePast(Fault):
    """The clock from which event ids are made goes back by an hour."""

    name = "ids-of-the-past"
    parts = ("outbox-ids",)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        testbed.query("ALTER TABLE outbox ALTER COLUMN id SET DEFAULT uuidv7(interval '-1 hour')")

        def written() -> int:
            [(count,)] = testbed.query(
                "SELECT count(*) FROM outbox WHERE uuid_extract_timestamp(id) < now() - interval '30 minutes'"
                " AND occurred_at > (now() AT TIME ZONE 'UTC') - interval '30 minutes'"
            )
            return int(count)

        try:
            count = wait_for("events with ids of the past", written, timeout_s=30)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        return f"{count} events have ids of an hour ago"

    def heal(self, testbed: Testbed) -> None:
        testbed.query("ALTER TABLE outbox ALTER COLUMN id SET DEFAULT uuidv7()")


FAULTS: list[Callable[[], Fault]] = [KilledInRequest, IdsOfThePast]
