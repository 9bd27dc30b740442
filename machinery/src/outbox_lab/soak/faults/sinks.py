"""The sinks: killed at any moment and in the worst one; their checkpoints damaged; rewound."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.sink.remembering.positions import checkpoint_folder, checkpoint_uri
from outbox_lab.soak.fault import NotFired, Strike, run, wait_or_not_fired
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack.command import SinkProcess
from outbox_lab.walkthrough.crash import Window

GENERATION = "SELECT generation FROM public.sinks WHERE name = %s"
BURST_EVENTS = 20
COMMIT_TIMEOUT_S = 180.0


def _choose(strike: Strike, processes: Sequence[SinkProcess] | None = None) -> SinkProcess:
    """One of these processes of sinks, by default of all, and one of its sinks."""
    process = strike.chance.choice(strike.testbed.sinks if processes is None else processes)
    strike.victims = (process.name,)
    strike.sink = strike.chance.choice(strike.testbed.names_of(process))
    return process


def restart(strike: Strike) -> None:
    for process in strike.testbed.sinks:
        process.start()


def kill(strike: Strike) -> str:
    process = _choose(strike)
    pid = process.pid()
    process.kill()
    if pid is None:
        raise NotFired(f"{process.name} did not run")
    return f"{process.name}, process {pid}, was killed"


def kill_spark(strike: Strike) -> str:
    process, killed = _choose(strike), list[int]()
    for one in process.processes():
        with suppress(psutil.NoSuchProcess):
            if one.name() == "java":
                one.kill()
                killed.append(one.pid)
    if not killed:
        raise NotFired(f"{process.name} had no JVM")
    wait_or_not_fired(f"{process.name} to notice", lambda: not process.is_running(), timeout_s=90)
    return f"{process.name}, JVM {killed[0]}, was killed, and the process has ended"


def kill_between_commits(strike: Strike) -> str:
    """Not the sinks with a Delta table: they need Spark for the commit, and it is frozen."""
    testbed = strike.testbed
    process = _choose(strike, [one for one in testbed.sinks if one is not testbed.clustered])
    window = Window(testbed.settings, process, testbed.names_of(process))
    process.kill()  # with a batch in hand it would not end gently while the window holds its lock

    def count() -> int:
        return int(testbed.query("SELECT count(*) FROM public.outbox")[0][0])

    def wait_for_events() -> None:
        """Until each sink has something to read."""
        before = count()
        wait_for("new events", lambda: count() > before + BURST_EVENTS, timeout_s=60)

    try:
        crashes = window.kill_in_it(wait_for_events)
    except (Failure, TimeoutError) as error:
        raise NotFired(str(error)) from error
    finally:
        window.close()
    if missed := [name for name, crash in crashes.items() if not crash.fired]:
        raise NotFired(f"not between the commits of {', '.join(missed)}")
    return "; ".join(f"{name} batch {crash.planned_batch}" for name, crash in crashes.items())


def rewind(strike: Strike) -> str:
    process = _choose(strike)
    strike.testbed.check(f"before {strike.fault.name}")
    process.kill()
    # The database may need a moment to see that the killed driver is gone.
    run(strike.testbed, "rewind", strike.sink, "--to-earliest", "--yes", temporary={"sink-has-driver"})
    return f"{strike.sink} reads everything again"


# Checkpoints -------------------------------------------------------------------------------------------------------


def damage_checkpoint(strike: Strike, damage: Callable[[Path, Random], str]) -> str:
    """Damage a checkpoint while its sink is down. It has happened once the sink has committed again."""
    testbed, process = strike.testbed, _choose(strike)
    wait_committed(testbed, strike.sink)
    process.kill()
    done = damage(_folder(testbed, strike.sink), strike.chance)
    damaged_s = time.time()
    process.spawn()
    return f"{strike.sink}: {done}; then {wait_committed(testbed, strike.sink, damaged_s)} was committed"


def delete(folder: Path, _: Random) -> str:
    last = _last_entry(folder / "commits").name
    shutil.rmtree(folder)
    return f"{folder.name} was deleted, with commits up to {last}"


def truncate(folder: Path, chance: Random) -> str:
    log = chance.choice(["commits", "offsets"])
    entry = _last_entry(folder / log)
    content = entry.read_bytes()
    kept = chance.randrange(len(content))
    entry.write_bytes(content[:kept])
    return f"{log}/{entry.name} was cut to {kept} of {len(content)} bytes"


def _last_entry(log: Path) -> Path:
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
