"""The sinks: killed at any moment and in the worst one; their checkpoints damaged; rewound; driven twice."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.sink.spark import local_checkpoint
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed
from outbox.stack.command import Command
from outbox.walkthrough.crash import Window
from outbox.walkthrough.processes import SinkProcess

GENERATION = "SELECT generation FROM sinks WHERE name = %s"
POSITION = "SELECT coalesce(sum(next_offset), 0) FROM positions WHERE sink = %s"
BURST_EVENTS = 20


class _OfProcess(Fault):
    """A fault of one process of sinks, chosen by chance."""

    parts: tuple[str, ...] = ("sinks",)

    def choose(self, testbed: Testbed, chance: random.Random) -> SinkProcess:
        return chance.choice(testbed.sinks)

    def heal(self, testbed: Testbed) -> None:
        for process in testbed.sinks:
            process.start()


class Killed(_OfProcess):
    """SIGKILL at any moment, driver and executors at once."""

    name = "sinks-killed"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        pid = process.pid()
        process.kill()
        if pid is None:
            raise NotFired(f"{process.name} did not run")
        return f"{process.name}, process {pid}, was killed"


class SparkKilled(_OfProcess):
    """SIGKILL to the JVM with driver and executors. The Python process must notice, and end."""

    name = "sinks-spark-killed"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        pid = process.pid()
        jvms = [one for one in process.processes() if one.pid != pid and one.name() == "java"]
        for one in jvms:
            one.kill()
        if not jvms:
            raise NotFired(f"{process.name} had no JVM")
        try:
            wait_for(f"{process.name} to notice", lambda: not process.is_running(), timeout_s=90)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        return f"{process.name}, JVM {jvms[0].pid}, was killed, and the process has ended"


class KilledBetweenCommits(_OfProcess):
    """SIGKILL after the commit to the sink database and before Spark's."""

    name = "sinks-killed-between-commits"
    parts = ("sinks", "postgres", "kafka", "connect", "sinks-kafka", "sinks-postgres")
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        names = testbed.names_of(process)
        window = Window(testbed.settings, process, names)
        process.kill()  # with a batch in hand it would not end gently while the window holds its lock
        try:
            crashes = window.kill_in_it(lambda: self._wait_for_events(testbed))
        except (Failure, TimeoutError) as error:
            raise NotFired(str(error)) from error
        finally:
            window.close()
        missed = [name for name, crash in crashes.items() if not crash.fired]
        if missed:
            raise NotFired(f"not between the commits of {', '.join(missed)}")
        return "; ".join(f"{name} batch {crash.planned_batch}" for name, crash in crashes.items())

    @staticmethod
    def _wait_for_events(testbed: Testbed) -> None:
        """Until each sink has something to read."""
        [(before,)] = testbed.query("SELECT count(*) FROM outbox")
        wait_for(
            "new events",
            lambda: testbed.query("SELECT count(*) FROM outbox")[0][0] > before + BURST_EVENTS,
            timeout_s=60,
        )


class _Stopped(_OfProcess):
    """A fault that something does to one sink while its process is down."""

    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        sink = chance.choice(testbed.names_of(process))
        process.kill()
        return self.damage(testbed, sink, chance)

    def damage(self, testbed: Testbed, sink: str, chance: random.Random) -> str:
        """Do it, and return the evidence."""
        raise NotImplementedError

    @staticmethod
    def checkpoint(testbed: Testbed, sink: str) -> Path:
        """The folder of the sink's checkpoint."""
        [(generation,)] = testbed.query(GENERATION, [sink], SinkRole.AUDITOR)
        folder = local_checkpoint.folder(local_checkpoint.uri(testbed.settings, sink, generation))
        if folder is None or not folder.is_dir():
            raise NotFired(f"sink {sink} has no checkpoint")
        return folder


class CheckpointDeleted(_Stopped):
    """The whole checkpoint of a sink is deleted."""

    name = "checkpoint-deleted"

    def damage(self, testbed: Testbed, sink: str, chance: random.Random) -> str:
        del chance
        folder = self.checkpoint(testbed, sink)
        shutil.rmtree(folder)
        return f"{folder.name} was deleted"


class CommitLost(_Stopped):
    """The last entry of Spark's commit log is deleted, so that its batch is repeated."""

    name = "commit-deleted"

    def damage(self, testbed: Testbed, sink: str, chance: random.Random) -> str:
        del chance
        entry = _last(self.checkpoint(testbed, sink) / "commits")
        entry.unlink()
        return f"{sink}: commits/{entry.name} was deleted"


class Truncated(_Stopped):
    """The last entry of one of Spark's logs is cut short, as by a host that lost its power."""

    name = "checkpoint-truncated"

    def damage(self, testbed: Testbed, sink: str, chance: random.Random) -> str:
        log = chance.choice(["commits", "offsets"])
        entry = _last(self.checkpoint(testbed, sink) / log)
        content = entry.read_bytes()
        kept = chance.randrange(len(content))
        entry.write_bytes(content[:kept])
        return f"{sink}: {log}/{entry.name} has {kept} of {len(content)} bytes"


class Rewound(_Stopped):
    """`outbox rewind` to the beginning of the topics: every event is read again."""

    name = "sink-rewound"

    def damage(self, testbed: Testbed, sink: str, chance: random.Random) -> str:
        del chance

        def rewound() -> str:
            done = testbed.run("rewind", sink, "--to-earliest", "--yes")
            return done.stdout if done.returncode == 0 else ""

        try:  # the database may need a moment to see that the killed driver is gone
            wait_for("the sink to be rewound", rewound, timeout_s=90, poll_s=1)
        except TimeoutError as error:
            raise NotFired(f"{sink}: {testbed.run('rewind', sink, '--to-earliest', '--yes').stderr}") from error
        return f"{sink} reads everything again"


class SecondDriver(_OfProcess):
    """A second process starts for the same sink, and must be refused."""

    name = "second-driver"
    lasts_s = (0.0, 0.0)

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        sink = chance.choice(testbed.names_of(self.choose(testbed, chance)))
        second = Command("second-driver", testbed.settings, ["sink", sink, "--fail-fast"])
        second.spawn()
        try:
            wait_for("the second driver to be refused", lambda: not second.is_running(), timeout_s=90)
        except TimeoutError as error:
            second.kill()
            raise NotFired(str(error)) from error
        refusal = f"sink {sink} already has a driver"
        if refusal not in second.tail(50):
            raise NotFired(f"the second driver ended otherwise: {second.tail(3)}")
        return refusal


def _last(log: Path) -> Path:
    entries = sorted(log.glob("[0-9]*"), key=lambda entry: int(entry.name))
    if not entries:
        raise NotFired(f"{log} is empty")
    return entries[-1]


FAULTS: list[Callable[[], Fault]] = [
    Killed,
    SparkKilled,
    KilledBetweenCommits,
    CheckpointDeleted,
    CommitLost,
    Truncated,
    Rewound,
    SecondDriver,
]
