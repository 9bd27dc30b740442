"""Postgres, Kafka, Connect, connectors, the service and the links: killed, frozen, without a disk, cut, taken over."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress

import psutil
import psycopg2

from outbox.base.database import connect
from outbox.base.heavy import requests
from outbox.base.settings import SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest
from outbox_lab.soak.nemesis import NotFired, Strike, despite_faults, wait_or_not_fired
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack.process import Process

# Servers -----------------------------------------------------------------------------------------------------------


def kill(strike: Strike) -> str:
    pid = strike.server.pid()
    strike.server.kill()
    if pid is None:
        raise NotFired(f"{strike.part} did not run")
    return f"process {pid} was killed"


def restart(strike: Strike) -> None:
    strike.server.start()
    strike.testbed.may_hang |= strike.part == "kafka"


def stop_all(process: Process) -> str:
    """Stop a process and its children (SIGSTOP). Returns how many there were."""

    def stopped() -> int:
        process.pause()  # again each time: one may have been forked meanwhile, and a signal needs a moment
        try:
            states = [one.status() for one in process.processes()]
        except psutil.NoSuchProcess:
            return 0
        return len(states) if set(states) == {psutil.STATUS_STOPPED} else 0

    what = f"all processes of {process.name} to be stopped"
    return f"{wait_or_not_fired(what, stopped, timeout_s=30, poll_s=0.1)} processes of {process.name} were stopped"


def thaw(strike: Strike) -> None:
    strike.server.resume()
    strike.server.start()


# Disks -------------------------------------------------------------------------------------------------------------

ROOM_BYTES = 32 * 1024  # in the part's own log, for the error
NOTICED_TIMEOUT_S = 120.0
# As the C library calls the error, in the log of either.
FAILING = re.compile(r".*File too large.*")
WRITE = "SELECT pg_logical_emit_message(true, 'soak', 'one more byte')"


def fail_writes(strike: Strike) -> str:
    """Limit the size of files (RLIMIT_FSIZE), which needs no file system of its own.

    On a disk that is only full, reserved room can still be written to, such as Postgres's write-ahead log.
    """
    server = strike.server
    size = server.log_size()
    count = _limit_files(server, f"{size + ROOM_BYTES}:unlimited")

    def noticed() -> str:
        how = ""
        if strike.part == "postgres":  # a broker writes all the time, and ends by itself
            try:
                strike.testbed.superuser(WRITE)
            except psycopg2.Error as error:
                how = str(error).splitlines()[0]
        logged = FAILING.search(server.log_since(size))
        how = how or ("" if server.is_running() else "it has ended")
        return f"{logged[0].strip()} ({how})" if logged and how else ""

    what = f"{strike.part} to log that it cannot write"
    line = wait_or_not_fired(what, noticed, timeout_s=NOTICED_TIMEOUT_S, poll_s=0.2)
    return f"{count} processes could not write: {line}"


def allow_writes(strike: Strike) -> None:
    _limit_files(strike.server, "unlimited:unlimited")
    if not strike.server.is_ready():  # it may be about to end
        strike.server.kill()
    restart(strike)


def _limit_files(process: Process, limit: str) -> int:
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


# Links -------------------------------------------------------------------------------------------------------------


def break_link(strike: Strike, affect: Callable[[Proxy], int], effect: str) -> str:
    """Break a link while a connection uses it. It has happened once that was ended, or what came through was held."""
    proxy, link = strike.testbed.links[strike.part], strike.part
    before = proxy.bytes

    def is_used() -> bool:
        return proxy.bytes > before and proxy.connections > 0

    def affected() -> int:
        wait_or_not_fired(f"link {link} to be used", is_used, timeout_s=60, poll_s=0.001)
        connections = affect(proxy)
        if not connections:  # the last one has ended meanwhile
            proxy.heal()
        return connections

    connections = wait_or_not_fired(f"a connection on link {link}", affected, timeout_s=60)
    wait_or_not_fired(f"{effect} on link {link}", lambda: proxy.affected, timeout_s=60)
    return f"{connections} connections, {proxy.affected} {effect} so far"


# The service -------------------------------------------------------------------------------------------------------

STORED = "SELECT key FROM public.idempotency_keys WHERE %s IS NULL OR expires_at > %s"
PAST = """
SELECT id::text FROM public.outbox
 WHERE uuid_extract_timestamp(id) < now() - interval '30 minutes'
   AND occurred_at > (now() AT TIME ZONE 'UTC') - interval '30 minutes'
"""
WAITING = """
SELECT count(*) FROM pg_stat_activity WHERE usename = %s AND wait_event_type = 'Lock' AND state = 'active'
"""


def kill_in_request(strike: Strike) -> str:
    testbed = strike.testbed
    with closing(connect(testbed.settings, SourceRole.OWNER)) as holder, holder.cursor() as cursor:
        # Each insert waits: its transaction has written the rest.
        cursor.execute("LOCK TABLE public.outbox IN SHARE MODE")
        role = testbed.settings.role_name(SourceRole.APP)
        inside = wait_or_not_fired(
            "a request in its transaction", lambda: int(testbed.superuser(WAITING, [role])[0][0]), timeout_s=30
        )
        killed = _kill_workers(testbed)
        holder.rollback()
    return f"workers {killed} were killed with {inside} requests in their transactions"


def kill_after_commit(strike: Strike) -> str:
    testbed = strike.testbed
    proxy = testbed.links["client-service"]
    proxy.hold(requests=False)
    [(before,)] = testbed.query("SELECT max(expires_at) FROM public.idempotency_keys")

    def committed() -> list[str]:
        held = proxy.affected  # first: each of these answers is that of a transaction, or of a read
        return [key for (key,) in testbed.query(STORED, [before, before])] if held else []

    keys = wait_or_not_fired("an answer that is committed and held", committed, timeout_s=60)
    killed = _kill_workers(testbed)
    answers = proxy.affected
    proxy.cut()  # the answers are lost
    return f"workers {killed} were killed; {len(keys)} keys were stored, {answers} answers lost"


def restart_service(strike: Strike) -> None:
    strike.heal_links()
    strike.testbed.service.start()


def _kill_workers(testbed: Testbed) -> str:
    """Kill the service's workers, and return their ids."""
    master = testbed.service.pid()
    workers = [] if master is None else psutil.Process(master).children()
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            worker.kill()
    if not workers:
        raise NotFired("the service had no worker")
    return ", ".join(str(worker.pid) for worker in workers)


def set_clock_back(strike: Strike) -> str:
    testbed = strike.testbed
    before = testbed.query(PAST)  # of an earlier time
    make_ids(strike, "uuidv7(interval '-1 hour')")
    written = despite_faults(lambda: len({*testbed.query(PAST)}.difference(before)))
    count = wait_or_not_fired("events with ids of the past", written, timeout_s=60, poll_s=0.2)
    return f"{count} events have ids of an hour ago"


def make_ids(strike: Strike, default: str = "uuidv7()") -> None:
    """Let the database make event ids so."""
    statement = f"ALTER TABLE public.outbox ALTER COLUMN id SET DEFAULT {default}"
    altered = despite_faults(lambda: strike.testbed.query(statement) == [])
    wait_for("the default of outbox.id to be set", altered, timeout_s=120, poll_s=0.5)


TASK_TIMEOUT_S = 120.0
FENCED_TIMEOUT_S = 15.0
ZOMBIE_ATTEMPTS = 4
# Materialized: else Postgres may ask the function first, for the sessions of everybody.
TERMINATE = """
WITH found AS MATERIALIZED (
    SELECT pid FROM pg_stat_replication JOIN pg_replication_slots ON active_pid = pid
     WHERE slot_name = %s AND pid <> ALL(%s)
)
SELECT pid FROM found WHERE pg_terminate_backend(pid)
"""
RUNNING_TIMEOUT_S = 240.0  # a transaction of a task that was fenced ends after a minute, and only then `apply` goes on
# As Kafka's producer and Connect's task log it: the broker has refused a record or an offset of the old task.
FENCED = re.compile(r"InvalidProducerEpochException|ProducerFencedException|fenced by another|newer producer")


def terminate_replication(strike: Strike) -> str:
    testbed = strike.testbed
    pids: dict[str, list[int]] = {one.name: [] for one in testbed.connectors}
    for _ in range(strike.chance.randint(1, 3)):
        for slot, before in pids.items():
            # One that ends slowly can be signalled twice: not one of those before.
            rows = wait_or_not_fired(
                f"another connection to read slot {slot}",
                lambda: testbed.superuser(TERMINATE, [slot, list(before)]),  # noqa: B023
                timeout_s=90,
            )
            before.append(int(rows[0][0]))
    found = (f"{', '.join(map(str, of_slot))} of slot {slot}" for slot, of_slot in pids.items())
    return f"backends {', and '.join(found)} were terminated"


def wait_running(strike: Strike) -> None:
    """Wait until the task of each connector runs, and apply a connector while it does not."""
    testbed = strike.testbed
    for connector in testbed.connectors:

        def is_running(connector: Connector = connector) -> bool:
            rest = Rest(testbed.settings, connector)
            if not rest.state().is_running:
                testbed.apply_one(connector)
            return rest.state().is_running

        what = f"the task of {connector.name} to run"
        wait_for(what, despite_faults(is_running), timeout_s=RUNNING_TIMEOUT_S, poll_s=0.5)


# Two workers -------------------------------------------------------------------------------------------------------


def return_as_zombie(strike: Strike) -> str:
    """The worker may see that it has left the group before it writes: then the other one is frozen."""
    testbed = strike.testbed
    connector = strike.chance.choice(testbed.connectors)
    testbed.second_worker.start()
    workers = [testbed.worker, testbed.second_worker]
    for _ in range(ZOMBIE_ATTEMPTS):
        _wait_relaying(testbed, connector)
        if _task_of(testbed, connector, workers[1].url):
            workers.reverse()
        frozen, url = workers[0], workers[1].url
        size = frozen.log_size()
        frozen.pause()
        taken = _wait_for_task(testbed, connector, url)
        frozen.resume()
        done = f"worker {taken} took the task of {connector.name} from {frozen.name}, which came back"
        if not testbed.settings.exactly_once:
            return done
        with suppress(TimeoutError):
            what = f"{frozen.name} to be fenced"
            wait_for(what, lambda: FENCED.search(frozen.log_since(size)), timeout_s=FENCED_TIMEOUT_S)  # noqa: B023
            return f"{done} and was fenced"
    raise NotFired(f"{ZOMBIE_ATTEMPTS} times, a frozen worker came back and did not write")


def rebalance(strike: Strike) -> str:
    testbed = strike.testbed
    testbed.second_worker.start()
    testbed.worker.stop()
    taken = [_wait_for_task(testbed, connector, testbed.second_worker.url) for connector in testbed.connectors]
    testbed.worker.start()
    return f"worker {taken[0]} took {len(taken)} tasks"


def end_second_worker(strike: Strike) -> None:
    testbed = strike.testbed
    testbed.worker.resume()
    testbed.worker.start()
    testbed.second_worker.resume()
    testbed.second_worker.stop()
    wait_running(strike)


def _wait_for_task(testbed: Testbed, connector: Connector, url: str) -> str:
    """Wait until the worker with this URL has the task of a connector, and return its name."""
    what = f"the worker at {url} to have the task of {connector.name}"
    return wait_or_not_fired(what, lambda: _task_of(testbed, connector, url), timeout_s=TASK_TIMEOUT_S)


def _task_of(testbed: Testbed, connector: Connector, url: str) -> str:
    """The name of the worker with this URL, if it has the task of a connector; else empty."""
    login = testbed.settings.connect_login
    with suppress(ValueError, KeyError, requests.RequestException):
        status = requests.get(f"{url}/connectors/{connector.name}/status", auth=login, timeout=5).json()
        tasks = [task for task in status.get("tasks", []) if task["state"] == "RUNNING"]
        if tasks and tasks[0]["worker_id"].endswith(url.removeprefix("http://")):
            return str(tasks[0]["worker_id"])
    return ""


def _wait_relaying(testbed: Testbed, connector: Connector) -> None:
    """Wait until a connector relays something. Raises NotFired if it does not."""

    def records() -> int:
        return sum(sum(topics.high_watermarks(testbed.settings, name).values()) for name in connector.topics)

    before = records()
    what = f"connector {connector.name} to relay something"
    wait_or_not_fired(what, lambda: records() > before, timeout_s=TASK_TIMEOUT_S)
