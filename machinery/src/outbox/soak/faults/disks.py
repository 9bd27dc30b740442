"""Full disks of Postgres and of Kafka."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil
import psycopg2

from outbox.base.wait import wait_for
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed
from outbox.stack.process import Process

FULL = (0, resource.RLIM_INFINITY)
FREE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
WRITE = "SELECT pg_logical_emit_message(true, 'soak', 'one more byte')"


class DiskFull(Fault):
    """Every write to a file fails, as on a full disk, until there is room again."""

    # It needs no file system of its own, and so no root: the limit is that on the size of files (RLIMIT_FSIZE).

    def __init__(self, part: str) -> None:
        self.part = part
        self.parts = (part,)
        self.name = f"{part}-disk-full"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        if not psutil.LINUX:
            raise NotFired("only Linux limits the files of a process that runs")
        process = testbed.stack.part(self.part)
        count = _limit(process, FULL)

        def is_noticed() -> str:
            return "it has ended" if not process.is_running() else self._refusal(testbed)

        try:
            noticed = wait_for(f"{self.part} to fail to write", is_noticed, timeout_s=60)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        return f"{count} processes could not write: {noticed}"

    def heal(self, testbed: Testbed) -> None:
        process = testbed.stack.part(self.part)
        _limit(process, FREE)
        if not process.is_ready():  # it may be about to end
            process.kill()
        process.start()
        testbed.may_hang |= self.part == "kafka"

    def _refusal(self, testbed: Testbed) -> str:
        """How Postgres refuses a write; empty if it does not. A broker that cannot write ends by itself."""
        if self.part == "postgres":
            try:
                testbed.superuser(WRITE)
            except psycopg2.Error as error:
                return str(error).splitlines()[0]
        return ""


def _limit(process: Process, limit: tuple[int, int]) -> int:
    """Limit the size of the files of all its processes. Returns how many there are."""
    found = process.processes()
    for one in found:
        with suppress(psutil.NoSuchProcess):
            one.rlimit(resource.RLIMIT_FSIZE, limit)
    return len(found)


FAULTS: list[Callable[[], Fault]] = [partial(DiskFull, part) for part in ("postgres", "kafka")]
