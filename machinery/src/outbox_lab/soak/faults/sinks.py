"""The sinks: killed at any moment and in the worst ones; frozen; on another engine; checkpoints damaged; rewound."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.sink import discovery
from outbox.sink.remembering import fence
from outbox_lab.soak.faults.servers import stop_all
from outbox_lab.soak.nemesis import NotFired, Strike, run, wait_or_not_fired
from outbox_lab.soak.testbed import SinkPart, Testbed
from outbox_lab.walkthrough.faults import Checkpoint, Window

OTHER = {"spark": "plain", "plain": "spark"}
REACHED = "SELECT coalesce(sum(next_offset), 0)::bigint FROM public.positions WHERE sink = %s"
BURST_EVENTS = 20
COMMIT_TIMEOUT_S = 180.0
REFUSED = "sink-has-driver"  # in the log, of each sink that another driver has


def _choose(strike: Strike, processes: Sequence[SinkPart] | None = None) -> SinkPart:
    """One of these processes of sinks, by default of all, and one of its sinks."""
    process = strike.chance.choice(strike.testbed.sinks if processes is None else processes)
    strike.victims = (process.name,)
    strike.sink = strike.chance.choice(process.names)
    return process


def _reached(testbed: Testbed, sink: str) -> int:
    """How far a sink is: the sum of its positions."""
    return int(testbed.query(REACHED, [sink], SinkRole.AUDITOR)[0][0])


def _wait_applied(process: SinkPart, testbed: Testbed) -> str:
    """Wait until each sink of a process has applied something. Returns how far they are then."""
    before = {name: _reached(testbed, name) for name in process.names}

    def moved() -> dict[str, int] | None:
        now = {name: _reached(testbed, name) for name in before}
        return now if all(now[name] > before[name] for name in before) else None

    what = f"each sink of {process} to apply something"
    found = wait_or_not_fired(what, moved, timeout_s=COMMIT_TIMEOUT_S, poll_s=0.5)
    return ", ".join(f"{name} from {before[name]} to {found[name]}" for name in before)


def restart(strike: Strike) -> None:
    """Undo whatever a fault has done to sinks and their links."""
    testbed = strike.testbed
    strike.heal_links()
    for process in testbed.sinks:
        if process.name in strike.victims:
            _second(testbed, process).stop()
        process.resume()
        if process.engine != process.own_engine:
            process.stop()
            process.run_on(process.own_engine)
    for process in testbed.sinks:
        process.start()


def kill(strike: Strike) -> str:
    process = _choose(strike)
    pid = process.pid()
    process.kill()
    if pid is None:
        raise NotFired(f"{process.name} did not run")
    return f"{process}, process {pid}, was killed"


def on_spark(testbed: Testbed) -> list[SinkPart]:
    return testbed.sinks_on("spark")


def freeze(strike: Strike) -> str:
    """Half of the time in a transaction, which the database ends after a minute."""
    process = _choose(strike)
    if strike.chance.random() < 1 / 2:
        return stop_all(process)
    with _waiting(strike, *LAST_STATEMENT) as where:
        return f"{stop_all(process)} {where}"


def kill_spark(strike: Strike) -> str:
    process, killed = _choose(strike, on_spark(strike.testbed)), list[int]()
    for one in process.processes():
        with suppress(psutil.NoSuchProcess):
            if one.name() == "java":
                one.kill()
                killed.append(one.pid)
    if not killed:
        raise NotFired(f"{process.name} had no JVM")
    wait_or_not_fired(f"{process.name} to notice", lambda: not process.is_running(), timeout_s=90)
    return f"{process.name}, JVM {killed[0]}, was killed, and the process has ended"


def with_two_commits(testbed: Testbed) -> list[SinkPart]:
    """The processes on Spark that need it for nothing else: those with a Delta table need it for their own commit."""
    return [one for one in on_either(testbed) if one.engine == "spark"]


def kill_between_commits(strike: Strike) -> str:
    testbed = strike.testbed
    process = _choose(strike, with_two_commits(testbed))
    window = Window(testbed.settings, process, process.names)
    process.kill()  # with a batch in hand it would not end gently while the window holds its lock

    def wait_for_events() -> None:
        """Until each sink has something to read."""
        counted = "SELECT count(*) FROM public.outbox"
        enough = testbed.query(counted)[0][0] + BURST_EVENTS
        wait_for("new events", lambda: testbed.query(counted)[0][0] > enough, timeout_s=60)

    try:
        crashes = window.kill_in_it(wait_for_events)
    except (Failure, TimeoutError) as error:
        raise NotFired(str(error)) from error
    finally:
        window.close()
    if missed := [name for name, crash in crashes.items() if not crash.fired]:
        raise NotFired(f"not between the commits of {', '.join(missed)}")
    return "; ".join(f"{name} batch {crash.planned_batch}" for name, crash in crashes.items())


# Within a transaction -----------------------------------------------------------------------------------------------

LAST_STATEMENT = ("SELECT FROM public.sinks WHERE name = %s FOR UPDATE", "SET applied = applied")
WAITING = """
SELECT pid FROM pg_stat_activity WHERE %s = ANY(pg_blocking_pids(pid)) AND strpos(query, %s) > 0
"""


def kill_before_commit(strike: Strike) -> str:
    """The last statement of a batch counts it, behind whatever the batch has written, here or elsewhere."""
    return _kill_waiting(strike, _choose(strike), *LAST_STATEMENT)


def kill_in_call(strike: Strike) -> str:
    process = _choose(strike, strike.testbed.sinks_on("handlers"))
    table = strike.testbed.options.handlers[strike.sink].table
    return _kill_waiting(strike, process, f"LOCK TABLE {table} IN SHARE MODE", table)


def _kill_waiting(strike: Strike, process: SinkPart, lock: str, words: str) -> str:
    testbed, sink = strike.testbed, strike.sink
    with _waiting(strike, lock, words) as where:
        before = _reached(testbed, sink)
        process.kill()
    if _has_moved(testbed, sink, before):
        raise NotFired(f"the transaction of {sink} was committed")
    return f"{process} was killed {where}, and nothing was committed"


def _has_moved(testbed: Testbed, sink: str, before: int) -> bool:
    """Whether a sink is further than before, once the session of its killed process is gone."""
    with closing(connect(testbed.settings, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        fence.lock(cursor, sink)
        return _reached(testbed, sink) != before


@contextmanager
def _waiting(strike: Strike, lock: str, words: str) -> Iterator[str]:
    """Let a transaction of the chosen sink wait for a lock during the block, in a statement with these words."""
    testbed, sink = strike.testbed, strike.sink
    with closing(connect(testbed.settings, SinkRole.OWNER)) as holder, holder.cursor() as cursor:
        cursor.execute(lock, [sink] if "%s" in lock else None)

        def waiting() -> list[tuple[Any, ...]]:
            return testbed.superuser(WAITING, [holder.info.backend_pid, words])

        what = f"a transaction of {sink} to wait with `{words}`"
        (pid,), *_ = wait_or_not_fired(what, waiting, timeout_s=COMMIT_TIMEOUT_S)
        yield f"while backend {pid} waited with `{words}` of {sink}"


# Within a transaction of Kafka, and behind it ------------------------------------------------------------------------

PACKET_DELAY_S = 0.3
WRITE_ATTEMPTS, WRITE_TIMEOUT_S = 5, 20.0


def _choose_writer(strike: Strike) -> tuple[SinkPart, str]:
    """A process of sinks that write to topics, one of these sinks, and its topic."""
    written = strike.testbed.written_topics
    strike.sink = strike.chance.choice(sorted(written))
    process = strike.testbed.process_of(strike.sink)
    strike.victims = (process.name,)
    return process, written[strike.sink]


def kill_in_topic(strike: Strike) -> str:
    """Its packets are late, so that it can be caught in its transaction."""
    testbed, link = strike.testbed, strike.testbed.links["sinks-kafka"]
    process, topic = _choose_writer(strike)

    def is_open() -> int:
        """How many records of open transactions the topic has."""
        high, stable = (ask(testbed.settings, topic) for ask in (topics.high_watermarks, topics.last_stable_offsets))
        return max(0, sum(high.values()) - sum(stable.values()))

    for _ in range(WRITE_ATTEMPTS):
        link.delay(PACKET_DELAY_S)
        wait_or_not_fired(f"{strike.sink} to write", is_open, timeout_s=COMMIT_TIMEOUT_S, poll_s=0.01)
        process.kill()
        link.heal()
        if count := is_open():
            return f"{process} was killed, and {count} records on {topic} are of an open transaction"
        process.start()
    raise NotFired(f"{WRITE_ATTEMPTS} times, {strike.sink} was not caught in a transaction")


def kill_behind_topic(strike: Strike) -> str:
    """Its COMMIT to Postgres is held on its link, and lost when it is killed."""
    testbed, link = strike.testbed, strike.testbed.links["sinks-postgres"]
    process, topic = _choose_writer(strike)

    def committed() -> int:
        return sum(topics.last_stable_offsets(testbed.settings, topic).values())

    for _ in range(WRITE_ATTEMPTS):
        with _waiting(strike, *LAST_STATEMENT):
            before, reached = committed(), _reached(testbed, strike.sink)
            link.hold(answers=False)
        with suppress(NotFired):  # a batch may have nothing to write
            wait_or_not_fired("a commit", lambda: committed() > before, timeout_s=WRITE_TIMEOUT_S)  # noqa: B023
        process.kill()
        link.cut()
        link.heal()
        if (ahead := committed() - before) and not _has_moved(testbed, strike.sink, reached):
            return f"{process} was killed, {topic} has {ahead} offsets more, and {strike.sink} is still at {reached}"
        process.start()
    raise NotFired(f"{WRITE_ATTEMPTS} times, {strike.sink} was not caught between its commits")


# Engines ------------------------------------------------------------------------------------------------------------


def on_either(testbed: Testbed) -> list[SinkPart]:
    """The processes whose sinks run with and without Spark."""

    def is_on(engine: str, process: SinkPart) -> bool:
        _, failures = discovery.usable(testbed.settings, process.names, engine)
        return not failures

    return [one for one in testbed.sinks_on(*OTHER) if all(is_on(engine, one) for engine in OTHER)]


def change_engine(strike: Strike) -> str:
    process = _choose(strike, on_either(strike.testbed))
    before = str(process)
    strike.chance.choice([process.stop, process.kill])()
    process.run_on(OTHER[process.engine])
    process.spawn()
    return f"{before} was restarted as {process}: {_wait_applied(process, strike.testbed)}"


def return_as_zombie(strike: Strike) -> str:
    """The sinks run on the other engine meanwhile, if they run on both."""
    testbed = strike.testbed
    process = _choose(strike, testbed.sinks_on(*OTHER, "handlers"))
    second, size = _second(testbed, process), process.log_size()
    if process in on_either(testbed):
        second.run_on(OTHER[process.engine])
    stop_all(process)
    with closing(connect(testbed.settings, SinkRole.AUDITOR)) as watcher, watcher.cursor() as cursor:
        for holder in (fence.driver(cursor, name) for name in process.names):
            # As Postgres does when a host is gone.
            testbed.superuser("SELECT pg_terminate_backend(%s)", [holder[1] if holder else 0])
    second.spawn()
    applied = _wait_applied(second, testbed)
    process.resume()
    wait_or_not_fired(f"{process} to end", lambda: not process.is_running(), timeout_s=COMMIT_TIMEOUT_S, poll_s=0.5)
    if (count := process.log_since(size).count(REFUSED)) < len(process.names):
        raise NotFired(f"{process} has ended with {count} refused sinks: {process.tail(1)}")
    return f"{second} has applied {applied}; {process} came back and was refused"


def _second(testbed: Testbed, process: SinkPart) -> SinkPart:
    """Another process of the same sinks."""
    return testbed.sinks_of(f"{process.name}-second", process.names, process.engine)


# Positions ----------------------------------------------------------------------------------------------------------


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
    testbed, process = strike.testbed, _choose(strike, on_spark(strike.testbed))
    _wait_committed(testbed, strike.sink)
    process.kill()
    done = damage(_checkpoint(testbed, strike.sink).folder, strike.chance)
    damaged_s = time.time()
    process.spawn()
    return f"{strike.sink}: {done}; then {_wait_committed(testbed, strike.sink, damaged_s)} was committed"


def delete(folder: Path, _: Random) -> str:
    shutil.rmtree(folder)
    return f"{folder.name} was deleted"


def truncate(folder: Path, chance: Random) -> str:
    entry = max((folder / chance.choice(["commits", "offsets"])).glob("[0-9]*"), key=lambda entry: int(entry.name))
    content = entry.read_bytes()
    kept = chance.randrange(len(content))
    entry.write_bytes(content[:kept])
    return f"{entry.relative_to(folder)} was cut to {kept} of {len(content)} bytes"


def _wait_committed(testbed: Testbed, sink: str, since_s: float = 0.0) -> str:
    """Wait until a sink has committed a batch after that moment, in the checkpoint that it has then. Returns which."""

    def committed() -> str | None:
        checkpoint = _checkpoint(testbed, sink)
        batch = checkpoint.committed()
        time_ms = checkpoint.committed_at_ms(batch)
        return f"batch {batch} of {checkpoint.folder.name}" if (time_ms or 0) > since_s * 1000 else None

    return wait_or_not_fired(f"{sink} to commit a batch", committed, timeout_s=COMMIT_TIMEOUT_S)


def _checkpoint(testbed: Testbed, sink: str) -> Checkpoint:
    [(generation,)] = testbed.query("SELECT generation FROM public.sinks WHERE name = %s", [sink], SinkRole.AUDITOR)
    return Checkpoint(testbed.settings, sink, generation)
