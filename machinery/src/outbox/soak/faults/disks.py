"""Failing disks of Postgres and of Kafka."""

from __future__ import annotations

import random
import re
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

ROOM_BYTES = 32 * 1024  # in the part's own log, for the error
FREE = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
ERROR = re.compile(r".*File too large.*")  # as the C library calls it, in the log of either
WRITE = "SELECT pg_logical_emit_message(true, 'soak', 'one more byte')"


class DiskFailing(Fault):
    """Writes behind the first kilobytes of a file fail for a while, as on a failing disk."""

    # It needs no file system of its own, and so no root: the limit is that on the size of files (RLIMIT_FSIZE). On a
    # disk that is only full, reserved room can still be written to, such as the segments of Postgres's write-ahead log.

    def __init__(self, part: str) -> None:
        self.part = part
        self.parts = (part,)
        self.name = f"{part}-disk-failing"

    def is_possible(self, testbed: Testbed) -> bool:
        del testbed
        return psutil.LINUX  # only Linux limits the files of a process that runs

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        process = testbed.stack.part(self.part)
        size = process.log_size()
        count = _limit(process, (size + ROOM_BYTES, resource.RLIM_INFINITY))

        def is_noticed() -> str:
            refusal = self._refusal(testbed)  # which makes Postgres write
            logged = ERROR.search(process.log_since(size))
            how = refusal or ("" if process.is_running() else "it has ended")
            return f"{logged[0].strip()} ({how})" if logged and how else ""

        try:
            noticed = wait_for(f"{self.part} to log that it cannot write", is_noticed, timeout_s=60, poll_s=0.2)
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


FAULTS: list[Callable[[], Fault]] = [partial(DiskFailing, part) for part in ("postgres", "kafka")]
