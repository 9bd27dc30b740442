"""Postgres, Kafka, the Connect worker, the service and the links: killed, frozen, without a disk, cut."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing, suppress

import psutil
import psycopg2

from outbox.base.database import connect
from outbox.base.settings import SourceRole
from outbox.base.wait import wait_for
from outbox_lab.soak.fault import NotFired, Strike, despite_faults, wait_or_not_fired
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


def freeze(strike: Strike) -> str:
    return stop_all(strike.server)


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
UNLIMITED = "unlimited:unlimited"
# As the C library calls the error, in the log of either.
FAILING = re.compile(r".*File too large.*")
WRITE = "SELECT pg_logical_emit_message(true, 'soak', 'one more byte')"


def can_limit_files(_: Testbed) -> bool:
    return shutil.which("prlimit") is not None  # only Linux limits the files of a process that runs


def fail_writes(strike: Strike) -> str:
    """Limit the size of files (RLIMIT_FSIZE), which needs no file system of its own.

    On a disk that is only full, reserved room can still be written to, such as Postgres's write-ahead log.
    """
    server = strike.server
    size = server.log_size()
    count = limit_files(server, f"{size + ROOM_BYTES}:unlimited")

    def noticed() -> str:
        refusal = _refusal(strike)
        logged = FAILING.search(server.log_since(size))
        how = refusal or ("" if server.is_running() else "it has ended")
        return f"{logged[0].strip()} ({how})" if logged and how else ""

    what = f"{strike.part} to log that it cannot write"
    line = wait_or_not_fired(what, noticed, timeout_s=NOTICED_TIMEOUT_S, poll_s=0.2)
    return f"{count} processes could not write: {line}"


def allow_writes(strike: Strike) -> None:
    limit_files(strike.server, UNLIMITED)
    if not strike.server.is_ready():  # it may be about to end
        strike.server.kill()
    restart(strike)


def _refusal(strike: Strike) -> str:
    """How Postgres refuses to write; empty if it does not. A broker writes all the time, and ends by itself."""
    if strike.part == "postgres":
        try:
            strike.testbed.superuser(WRITE)
        except psycopg2.Error as error:
            return str(error).splitlines()[0]
    return ""


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


# Links -------------------------------------------------------------------------------------------------------------

DELAY_S = 0.3


def slow_down(proxy: Proxy) -> int:
    return proxy.delay(DELAY_S)


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
    proxy.hold_answers()
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
    _make_ids(testbed, "uuidv7(interval '-1 hour')")

    written = despite_faults(lambda: len({*testbed.query(PAST)}.difference(before)))
    count = wait_or_not_fired("events with ids of the past", written, timeout_s=60, poll_s=0.2)
    return f"{count} events have ids of an hour ago"


def set_clock_right(strike: Strike) -> None:
    _make_ids(strike.testbed, "uuidv7()")


def _make_ids(testbed: Testbed, default: str) -> None:
    statement = f"ALTER TABLE public.outbox ALTER COLUMN id SET DEFAULT {default}"
    altered = despite_faults(lambda: testbed.query(statement) == [])
    wait_for("the default of outbox.id to be set", altered, timeout_s=120, poll_s=0.5)
