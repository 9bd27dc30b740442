"""Postgres, Kafka and the Connect worker: killed, and frozen."""

from __future__ import annotations

import random
from functools import partial

import psutil

from outbox_lab.soak.fault import FaultOfPart, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.testbed import Testbed


class Killed(FaultOfPart):
    """SIGKILL: all its processes at once."""

    what = "killed"

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        process = testbed.stack.part(self.part)
        pid = process.pid()
        process.kill()
        if pid is None:
            raise NotFired(f"{self.part} did not run")
        return f"process {pid} was killed"

    def heal(self, testbed: Testbed) -> None:
        testbed.stack.part(self.part).start()
        testbed.may_hang |= self.part == "kafka"


class Frozen(FaultOfPart):
    """SIGSTOP: it keeps connections and answers nothing; Connect for longer than its session timeout."""

    what = "frozen"

    def __init__(self, part: str) -> None:
        super().__init__(part)
        if part == "connect":
            self.lasts_s = (12.0, 20.0)

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        process = testbed.stack.part(self.part)

        def stopped() -> int:
            process.pause()  # again each time: one may have been forked meanwhile, and a signal needs a moment
            try:
                states = [one.status() for one in process.processes()]
            except psutil.NoSuchProcess:
                return 0
            return len(states) if set(states) == {psutil.STATUS_STOPPED} else 0

        what = f"all processes of {self.part} to be stopped"
        return f"{wait_or_not_fired(what, stopped, timeout_s=30, poll_s=0.1)} processes were stopped"

    def heal(self, testbed: Testbed) -> None:
        process = testbed.stack.part(self.part)
        process.resume()
        process.start()


FAULTS: list[Make] = [partial(kind, part) for part in ("postgres", "kafka", "connect") for kind in (Killed, Frozen)]
