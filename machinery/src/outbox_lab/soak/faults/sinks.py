"""The sinks: killed at any moment and in the worst one; their checkpoints damaged; rewound; driven twice."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.sink.remembering.positions import checkpoint_folder, checkpoint_uri
from outbox_lab.soak.fault import A_WHILE_S, Fault, Make, NotFired, wait_or_not_fired
from outbox_lab.soak.faults import commands
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack.command import Command
from outbox_lab.walkthrough.crash import Window
from outbox_lab.walkthrough.processes import SinkProcess

GENERATION = "SELECT generation FROM public.sinks WHERE name = %s"
BURST_EVENTS = 20
COMMIT_TIMEOUT_S = 180.0


class _OfProcess(Fault):
    """A fault of one process of sinks, chosen by chance."""

    parts: tuple[str, ...] = ("sinks",)

    def choose(self, testbed: Testbed, chance: random.Random) -> SinkProcess:
        chosen = chance.choice(self.candidates(testbed))
        self.victims = (chosen.name,)
        return chosen

    def candidates(self, testbed: Testbed) -> Sequence[SinkProcess]:
        return testbed.sinks

    def heal(self, testbed: Testbed) -> None:
        for process in testbed.sinks:
            process.start()


class Killed(_OfProcess):
    """SIGKILL at any moment: the driver, and the executors that are in its JVM."""

    name = "sinks-killed"
    lasts_s = A_WHILE_S

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        pid = process.pid()
        process.kill()
        if pid is None:
            raise NotFired(f"{process.name} did not run")
        return f"{process.name}, process {pid}, was killed"


class SparkKilled(_OfProcess):
    """SIGKILL to the driver's JVM. The Python process must notice, and end."""

    name = "sinks-spark-killed"
    lasts_s = A_WHILE_S

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        pid = process.pid()
        killed = [one.pid for one in process.processes() if one.pid != pid and _kill_jvm(one)]
        if not killed:
            raise NotFired(f"{process.name} had no JVM")
        wait_or_not_fired(f"{process.name} to notice", lambda: not process.is_running(), timeout_s=90)
        return f"{process.name}, JVM {killed[0]}, was killed, and the process has ended"


def _kill_jvm(process: psutil.Process) -> bool:
    """Kill a process if it is a JVM. Returns whether it was one."""
    with suppress(psutil.NoSuchProcess):
        if process.name() == "java":
            process.kill()
            return True
    return False


class KilledBetweenCommits(_OfProcess):
    """SIGKILL after the commit to the sink database and before Spark's."""

    name = "sinks-killed-between-commits"
    needs = ("postgres", "kafka", "connect", "sinks-kafka", "sinks-postgres")

    def candidates(self, testbed: Testbed) -> Sequence[SinkProcess]:
        """Not the sinks with a Delta table: they need Spark for the commit, and it is frozen."""
        return [one for one in testbed.sinks if one is not testbed.clustered]

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
        [(before,)] = testbed.query("SELECT count(*) FROM public.outbox")
        wait_for(
            "new events",
            lambda: testbed.query("SELECT count(*) FROM public.outbox")[0][0] > before + BURST_EVENTS,
            timeout_s=60,
        )


class _Damaged(_OfProcess):
    """A checkpoint that is damaged while its sink is down. It has happened once the sink has committed again."""

    needs = ("postgres", "kafka", "sinks-kafka", "sinks-postgres")

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        sink = chance.choice(testbed.names_of(process))
        wait_committed(testbed, sink)
        process.kill()
        done = self.damage(checkpoint(testbed, sink), chance)
        damaged_s = time.time()
        process.spawn()
        return f"{sink}: {done}; then {wait_committed(testbed, sink, damaged_s)} was committed"

    def damage(self, folder: Path, chance: random.Random) -> str:
        """Damage the checkpoint, and return the evidence."""
        raise NotImplementedError


class CheckpointDeleted(_Damaged):
    """The whole checkpoint of a sink is deleted."""

    name = "checkpoint-deleted"

    def damage(self, folder: Path, _: random.Random) -> str:
        last = last_entry(folder / "commits").name
        shutil.rmtree(folder)
        return f"{folder.name} was deleted, with commits up to {last}"


class CommitLost(_OfProcess):
    """The last entry of Spark's commit log is deleted, so that its batch is repeated."""

    name = "commit-deleted"
    needs = ("postgres", "kafka", "sinks-kafka", "sinks-postgres")

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        sink = chance.choice(testbed.names_of(process))
        wait_committed(testbed, sink)
        process.stop()
        folder = checkpoint(testbed, sink)
        entry = last_entry(folder / "commits")
        planned = last_entry(folder / "offsets")
        if planned.name != entry.name:  # not committed yet: Spark would repeat only this batch
            planned.unlink()
        entry.unlink()
        process.spawn()
        wait_or_not_fired(f"{sink} to commit batch {entry.name} again", entry.exists, timeout_s=COMMIT_TIMEOUT_S)
        return f"{sink}: batch {entry.name} was committed, and again after its entry was deleted"


class Truncated(_Damaged):
    """The last entry of one of Spark's logs is cut short, as by a host that lost its power."""

    name = "checkpoint-truncated"

    def damage(self, folder: Path, chance: random.Random) -> str:
        log = chance.choice(["commits", "offsets"])
        entry = last_entry(folder / log)
        content = entry.read_bytes()
        kept = chance.randrange(len(content))
        entry.write_bytes(content[:kept])
        return f"{log}/{entry.name} was cut to {kept} of {len(content)} bytes"


class Rewound(_OfProcess):
    """`outbox rewind` to the beginning of the topics: every event is read again."""

    name = "sink-rewound"
    needs = ("postgres", "kafka")

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        process = self.choose(testbed, chance)
        sink = chance.choice(testbed.names_of(process))
        testbed.check(f"before {self.name}")
        process.kill()
        # The database may need a moment to see that the killed driver is gone.
        commands.run(testbed, "rewind", sink, "--to-earliest", "--yes", temporary=("sink-has-driver",))
        return f"{sink} reads everything again"


class SecondDriver(_OfProcess):
    """A second process starts for the same sink, and must be refused."""

    name = "second-driver"
    parts = ()  # the first driver must not notice
    needs = ("sinks", "postgres", "kafka")

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        sink = chance.choice(testbed.names_of(self.choose(testbed, chance)))
        second = Command("second-driver", testbed.settings, ["sink", sink])
        size = second.log_size()  # of earlier ones
        second.spawn()
        try:
            wait_for("the second driver to be refused", lambda: not second.is_running(), timeout_s=90)
        except TimeoutError as error:
            second.kill()
            raise NotFired(str(error)) from error
        refusal = f"sink {sink} already has a driver"
        if refusal not in second.log_since(size):
            raise NotFired(f"the second driver ended otherwise: {second.tail(3)}")
        return refusal


def checkpoint(testbed: Testbed, sink: str) -> Path:
    """The folder of the sink's checkpoint. Raises NotFired if it does not exist."""
    folder = _folder(testbed, sink)
    if not folder.is_dir():
        raise NotFired(f"sink {sink} has no checkpoint")
    return folder


def last_entry(log: Path) -> Path:
    """The last entry of one of Spark's logs. Raises NotFired if it is empty."""
    entries = sorted(log.glob("[0-9]*"), key=lambda entry: int(entry.name))
    if not entries:
        raise NotFired(f"{log} is empty")
    return entries[-1]


def wait_committed(testbed: Testbed, sink: str, since_s: float = 0.0) -> str:
    """Wait until a sink has committed a batch after that moment, in the checkpoint that it has then. Returns which."""

    def committed() -> str | None:
        folder = _folder(testbed, sink)
        for entry in folder.glob("commits/[0-9]*"):
            with suppress(FileNotFoundError):  # Spark deletes old entries
                if entry.stat().st_mtime > since_s:
                    return f"{folder.name}/commits/{entry.name}"
        return None

    return str(wait_or_not_fired(f"{sink} to commit a batch", committed, timeout_s=COMMIT_TIMEOUT_S))


def _folder(testbed: Testbed, sink: str) -> Path:
    [(generation,)] = testbed.query(GENERATION, [sink], SinkRole.AUDITOR)
    folder = checkpoint_folder(checkpoint_uri(testbed.settings, sink, generation))
    if folder is None:
        raise NotFired(f"the checkpoint of sink {sink} is not on this host")
    return folder


FAULTS: list[Make] = [
    Killed,
    SparkKilled,
    KilledBetweenCommits,
    CheckpointDeleted,
    CommitLost,
    Truncated,
    Rewound,
    SecondDriver,
]
