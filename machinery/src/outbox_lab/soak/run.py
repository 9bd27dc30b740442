"""A run: start the chain, let clients and nemesis loose, heal everything, wait, read what was left, judge it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import psutil

from outbox.audit import check
from outbox.audit.report import Report
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.terminal import Progress, sparse
from outbox.relay.connectors import Connector
from outbox.relay.rest import Rest
from outbox_lab.soak import judge, observe
from outbox_lab.soak.clients import Clients
from outbox_lab.soak.domain import Domain, options_of
from outbox_lab.soak.history import Checked, Death, Injection, Recorder, checked
from outbox_lab.soak.judge import Verdict
from outbox_lab.soak.nemesis import Fault, Nemesis
from outbox_lab.soak.record import Folder, Plan, RunRecord
from outbox_lab.soak.testbed import Testbed
from outbox_lab.stack import interrupt
from outbox_lab.stack.process import MARK, Process, environment

REPORTED_EVERY_S = 60.0  # for those who follow a run for hours
# A handler that has failed for an event is called again later: the operator does not wait for that.
WAITING = "SELECT DISTINCT sink FROM public.dead_letters WHERE status = 'open' AND sink = ANY(%s)"
STUCK_S = 300.0  # so long nothing that is in flight arrives: then the run is judged as it is


def soak(  # noqa: PLR0917 - each is one thing of a run
    settings: Settings, domain: Domain, plan: Plan, faults: Mapping[str, Fault], folder: Folder, report: Progress
) -> Verdict:
    """Run the plan on a new stack in the home folder of the settings, and judge it.

    A run of which nobody can read what was left is judged by its faults, the ends of processes and the checks so far:
    `unknown`, or `invalid`. Nothing of it runs when this returns or raises.
    """
    testbed = Testbed(settings, domain.sinks, options_of(domain))
    folder.write("run.json", plan)
    with closing(_Run(testbed, domain, plan, folder, report)) as run:
        try:
            run.go(faults)
        except (Failure, TimeoutError) as error:
            return run.broken_off(str(error))
        except KeyboardInterrupt:
            run.say("interrupted: everything is stopped, and there is no verdict")
            raise
    return judge_again(domain, folder)


class _Run:
    """One run, and what it has recorded so far."""

    def __init__(self, testbed: Testbed, domain: Domain, plan: Plan, folder: Folder, report: Progress) -> None:
        self._testbed, self._domain, self._plan, self._folder = testbed, domain, plan, folder
        self._report = report
        self._began_s = time.monotonic()
        self._recorder = Recorder(folder.history_file)
        self._injections: Sequence[Injection] = []
        self._deaths: Sequence[Death] = []

    def say(self, text: str) -> None:
        """Report a line with the time since the run began."""
        self._report(f"{time.monotonic() - self._began_s:6.0f} s  {text}")

    def go(self, faults: Mapping[str, Fault]) -> None:
        """Start everything, break it, wait, and write what was left into the folder."""
        testbed = self._testbed
        testbed.start(self.say)
        clients = Clients(
            testbed.stack.through("client-service"), self._domain, self._recorder, self._plan.rate, self._plan.seed
        )
        clients.set_up()
        with keeping(testbed, self.say) as self._deaths:
            self._break(clients, Nemesis(testbed, faults, self._plan.seed, self.say))
            last = _settled(testbed.settings, self.say)
            for (name,) in testbed.query(WAITING, [[*testbed.options.handlers]], SinkRole.AUDITOR):
                testbed.run("dead-letters", "replay", "--sink", name)
        self._write_looks([*testbed.checks, last])
        seen = observe.read(testbed.settings, self._domain, testbed.sink_names)
        released = {topic: testbed.released[one.kind] for one in testbed.connectors for topic in one.topics}
        self._folder.write_seen(replace(seen, released=released))

    def broken_off(self, why: str) -> Verdict:
        """Judge what there is of a run that does not go on, and write the verdict."""
        checks = self._testbed.checks
        self._write_looks(checks)
        record = RunRecord(self._domain, self._plan, injections=self._injections, deaths=self._deaths, checks=checks)
        return _judged(record, self._folder, why)

    def close(self) -> None:
        """End everything."""
        self._recorder.close()
        self._testbed.stop()

    def _break(self, clients: Clients, nemesis: Nemesis) -> None:
        """Let clients and nemesis loose, until every fault is healed and the service answers."""
        report = sparse(self.say, REPORTED_EVERY_S)

        def watch() -> None:
            clients.require_running()
            report(progress(self._recorder, nemesis))

        self.say(f"faults begin, for {self._plan.duration_s:.0f} s; Ctrl-C ends them early")
        try:
            with clients.sending(), interrupt.asked_to_end(nemesis.end):
                nemesis.run(self._plan.duration_s, self._plan.pause_s, watch)
                clients.wait_answered()
        finally:
            self._injections = nemesis.injections
            self._folder.write("injections.json", self._injections)
        self.say(f"{progress(self._recorder, nemesis)}; waiting until the sinks have applied everything")

    def _write_looks(self, checks: Sequence[Checked]) -> None:
        self._folder.write("checks.json", checks)
        self._folder.write("deaths.json", self._deaths)


def progress(recorder: Recorder, nemesis: Nemesis) -> str:
    """How many requests and faults there were so far, and what is broken now."""
    outcomes = recorder.outcomes
    return (
        f"{outcomes.total()} requests: {outcomes['ok']} ok, {outcomes['failed']} failed, {outcomes['unknown']}"
        f" unknown; {len(nemesis.injections)} faults are over; now: {', '.join(nemesis.lasting) or 'no fault'}"
    )


def judge_again(domain: Domain, folder: Folder) -> Verdict:
    """Judge the files of a run, and write the verdict beside them."""
    return _judged(folder.record(domain), folder)


def _judged(record: RunRecord, folder: Folder, broken_off: str = "") -> Verdict:
    found = judge.judge(record, broken_off)
    folder.write("verdict.json", found)
    return found


def _settled(settings: Settings, report: Progress) -> Checked:
    """Wait until nothing is in flight, for as long as it becomes less, and return the last check.

    It says what is in flight if the sinks stand still. Raises Failure if a part is unavailable.
    """
    before = math.inf
    while True:
        try:
            done = check.check_settled(settings, STUCK_S, progress=sparse(report, REPORTED_EVERY_S))
        except check.InFlightError as error:
            if _in_flight(error.report) >= before:
                return checked("at the end", error.report.as_dict(), error.report.in_flight_text)
            before = _in_flight(error.report)
            report(f"in flight: {error.report.in_flight_text}")
        else:
            return checked("at the end", done.as_dict(), "" if done.settled else done.in_flight_text)


def _in_flight(report: Report) -> int:
    return report.in_flight + sum(sink.in_flight for sink in report.sinks)


# The keeper. It starts processes again that have ended by themselves, as systemd, docker-compose or Kubernetes would.
# It applies the connectors as an operator would: if a task does not run, and after a broker was killed. And it notes
# when a process ends, even if another part restarts it: `judge.unexplained_deaths` asks for the reason.

INTERVAL_S = 1.0
PATIENCE_S = 15.0


@contextmanager
def keeping(testbed: Testbed, report: Progress) -> Iterator[list[Death]]:
    """Look after service, sinks and connectors until the end of the block, except while a fault breaks them.

    Returns the deaths, which are added to the list as they happen. The last look at the processes is at the end of the
    block. Raises Failure if it fails, because then a death may have been missed.
    """
    stopped = threading.Event()
    deaths: list[Death] = []

    def keep(look: Callable[[], None]) -> None:
        while not stopped.wait(INTERVAL_S):
            attempt(look, report)

    servers = [testbed.stack.part(name) for name in ("postgres", "kafka", "connect")]
    watch = Watch({one.mark: one for one in (*servers, testbed.service, *testbed.sinks)}, deaths)
    watch()  # a process that ends before the first round counts too
    looks = (watch, lambda: _restart(testbed, report), _Connectors(testbed, report, watch))
    threads = [threading.Thread(target=keep, args=[look], name="keeper") for look in looks]
    for thread in threads:
        thread.start()
    try:
        yield deaths
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    try:
        watch()
    except (psutil.Error, OSError) as error:
        raise Failure(f"nobody knows which processes have ended: {error}", code="soak-keeper-failed") from error


def attempt(look: Callable[[], None], report: Progress) -> None:
    """Look, and report what goes wrong. The next look comes soon, and a keeper that has ended would look no more."""
    try:
        look()
    except Exception as error:
        report(f"the keeper failed, and tries again: {type(error).__name__}: {error}")


class Watch:
    """Notes the deaths of processes: each that was there at the last look, and is gone or another one now. At the first
    look all must be there.
    """

    def __init__(self, processes: Mapping[str, Process], deaths: list[Death]) -> None:
        """``processes``: by mark."""
        self._processes = processes
        self._pids: Mapping[str, int | None] = dict.fromkeys(processes)
        self._deaths = deaths
        self._began_s = self._looked_s = time.monotonic()

    def __call__(self) -> None:
        """Look now."""
        looks_s = time.monotonic()
        found = leaders(set(self._processes))
        for mark, pid in self._pids.items():
            living = found.get(mark, [])
            if not living or (pid is not None and pid not in living):
                process = self._processes[mark]
                self.note(process.name, process.tail(1), alive_s=self._looked_s, ended_s=time.monotonic())
        self._looked_s = looks_s
        self._pids = {
            mark: self._pids[mark] if self._pids.get(mark) in pids else pids[0] for mark, pids in found.items()
        }

    def note(self, name: str, last_line: str, *, alive_s: float, ended_s: float) -> None:
        """Add a death between these two times of the monotonic clock."""
        self._deaths.append(Death(name, ended_s - self._began_s, last_line[:300], alive_s - self._began_s))


def leaders(marks: set[str]) -> dict[str, list[int]]:
    """By mark, the leaders of sessions that live, the oldest first: one look at the table of processes.

    The oldest is the main process. A new backend of Postgres is another one, until it overwrites its environment.
    """
    found: dict[str, list[tuple[float, int]]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == process.pid and process.status() != psutil.STATUS_ZOMBIE:
                mark = environment(process).get(MARK)
                if mark in marks:
                    found.setdefault(mark, []).append((process.create_time(), process.pid))
    return {mark: [pid for _, pid in sorted(pids)] for mark, pids in found.items()}


def _restart(testbed: Testbed, report: Progress) -> None:
    for part, processes in {"service": [testbed.service], "sinks": testbed.sinks}.items():
        with testbed.free(part) as is_free:
            found = leaders({process.mark for process in processes}) if is_free else {}
            for process in processes if is_free else ():
                if process.mark not in found:
                    report(f"{process.name} has ended by itself and is started again: {process.tail(1)[:300]}")
                    try:
                        process.spawn()
                    except Failure as failure:  # its port is not free yet
                        report(f"{process.name} does not start: {failure}")


class _Connectors:
    """Looks after the connectors. Each may start again by itself, and gets time for that."""

    def __init__(self, testbed: Testbed, report: Progress, watch: Watch) -> None:
        self._testbed, self._report, self._watch = testbed, report, watch
        self._down_since_s: dict[str, float] = {}  # by name
        self._running_s: dict[str, float] = defaultdict(time.monotonic)  # by name, when it was last seen to run

    def __call__(self) -> None:
        testbed = self._testbed
        with testbed.free("connect") as is_free:
            if not is_free:
                self._down_since_s.clear()
                return
            for connector in testbed.connectors:
                with suppress(Failure, TimeoutError):  # what it needs may be broken
                    self._look(connector)
            with suppress(Failure, TimeoutError):
                if testbed.may_hang:
                    self._report(f"connectors: {testbed.apply()}, because a broker was killed")

    def _look(self, connector: Connector) -> None:
        state = Rest(self._testbed.settings, connector).state()
        now_s, last_s = time.monotonic(), self._running_s[connector.name]
        if state.is_running:
            self._running_s[connector.name] = now_s
            self._down_since_s.pop(connector.name, None)
        elif now_s - (since_s := self._down_since_s.setdefault(connector.name, now_s)) > PATIENCE_S:
            why = state.error or f"it is {state.connector}"
            self._watch.note("connector", f"{connector.name}: {why}", alive_s=last_s, ended_s=since_s)
            del self._down_since_s[connector.name]
            self._report(f"connector {connector.name}: {self._testbed.apply_one(connector)}, because {why}")
