"""Disks of Postgres and of Kafka that fail, or that are full."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from contextlib import suppress
from functools import partial

import psutil
import psycopg2

from outbox_lab.soak import namespace
from outbox_lab.soak.disk import KIB, Disk
from outbox_lab.soak.fault import FaultOfPart, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack.process import Process

ROOM_BYTES = 32 * 1024  # in the part's own log, for the error
NOTICED_TIMEOUT_S = 120.0
FREE = "unlimited:unlimited"
# As the C library calls the errors, in the log of either.
FAILING = re.compile(r".*File too large.*")
FULL = re.compile(r".*No space left on device.*")
WRITE = "SELECT pg_logical_emit_message(true, 'soak', 'one more byte')"
# Its write-ahead log has reserved room; a table has not.
GROW = "CREATE TEMPORARY TABLE filler AS SELECT generate_series(1, 100000)"


class _OfDisk(FaultOfPart):
    """A part cannot write. It has happened once the part logs that since."""

    def make_room(self, testbed: Testbed) -> None:
        """Let the part write again."""
        raise NotImplementedError

    def heal(self, testbed: Testbed) -> None:
        process = testbed.stack.part(self.part)
        self.make_room(testbed)
        if not process.is_ready():  # it may be about to end
            process.kill()
        process.start()
        testbed.may_hang |= self.part == "kafka"

    def refusal(self, testbed: Testbed, statement: str) -> str:
        """How Postgres refuses to write; empty if it does not. A broker writes all the time, and ends by itself."""
        if self.part == "postgres":
            try:
                testbed.superuser(statement)
            except psycopg2.Error as error:
                return str(error).splitlines()[0]
        return ""


class DiskFull(_OfDisk):
    """The disk of its data is full for a while: a write that needs more room is refused."""

    what = "disk-full"

    def prepare(self, testbed: Testbed) -> None:
        """Give the part a disk of its own."""
        if namespace.is_entered():
            testbed.disks[self.part] = Disk(testbed.stack.part(self.part).folder)
            testbed.disks[self.part].mount()

    def is_possible(self, testbed: Testbed) -> bool:
        return self.part in testbed.disks

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        disk, process = testbed.disks[self.part], testbed.stack.part(self.part)
        size = process.log_size()

        def is_noticed() -> str:
            disk.fill()
            self.refusal(testbed, GROW)
            logged = FULL.search(process.log_since(size))
            return logged[0].strip() if logged else ""

        what = f"{self.part} to log that its disk is full"
        noticed = wait_or_not_fired(what, is_noticed, timeout_s=NOTICED_TIMEOUT_S, poll_s=0.2)
        return f"with {disk.used_bytes // KIB} KiB it was full: {noticed[:300]}"

    def make_room(self, testbed: Testbed) -> None:
        testbed.disks[self.part].free()


class DiskFailing(_OfDisk):
    """Writes behind the first kilobytes of a file fail for a while, as on a failing disk."""

    # It needs no file system of its own: the limit is that on the size of files (RLIMIT_FSIZE). On a disk that is only
    # full, reserved room can still be written to, such as the segments of Postgres's write-ahead log.
    what = "disk-failing"

    def is_possible(self, _: Testbed) -> bool:
        return shutil.which("prlimit") is not None  # only Linux limits the files of a process that runs

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        process = testbed.stack.part(self.part)
        size = process.log_size()
        count = limit_files(process, f"{size + ROOM_BYTES}:unlimited")

        def is_noticed() -> str:
            refusal = self.refusal(testbed, WRITE)
            logged = FAILING.search(process.log_since(size))
            how = refusal or ("" if process.is_running() else "it has ended")
            return f"{logged[0].strip()} ({how})" if logged and how else ""

        what = f"{self.part} to log that it cannot write"
        noticed = wait_or_not_fired(what, is_noticed, timeout_s=NOTICED_TIMEOUT_S, poll_s=0.2)
        return f"{count} processes could not write: {noticed}"

    def make_room(self, testbed: Testbed) -> None:
        limit_files(testbed.stack.part(self.part), FREE)


def limit_files(process: Process, limit: str) -> int:
    """Limit the size of the files of all its processes. Returns how many there are.

    As the user of each: root that has not every capability may not limit those of others, such as Postgres's.
    """
    found = process.processes()
    for one in found:
        with suppress(psutil.NoSuchProcess):
            user, group = one.uids().real, one.gids().real
            argv = ["prlimit", f"--pid={one.pid}", f"--fsize={limit}"]
            done = subprocess.run(argv, user=user, group=group, capture_output=True, text=True, check=False)
            if done.returncode and one.is_running():
                raise NotFired(f"the files of process {one.pid} are not limited: {done.stderr.strip()}")
    return len(found)


FAULTS: list[Make] = [partial(kind, part) for part in ("postgres", "kafka") for kind in (DiskFailing, DiskFull)]
