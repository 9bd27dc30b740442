"""A run: start the chain, let clients and nemesis loose, heal everything, wait, read what was left, judge it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from outbox.audit import check
from outbox.audit.report import Report
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.base.terminal import Progress, sparse
from outbox_lab.soak import observe, verdict
from outbox_lab.soak.clients import Clients
from outbox_lab.soak.domain import Domain, options_of
from outbox_lab.soak.fault import Fault
from outbox_lab.soak.history import Checked, Death, Injection, Recorder, checked
from outbox_lab.soak.keeper import keeping
from outbox_lab.soak.nemesis import Nemesis
from outbox_lab.soak.record import Folder, Plan, RunRecord
from outbox_lab.soak.testbed import Testbed
from outbox_lab.soak.verdict import Verdict
from outbox_lab.stack import interrupt

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
    return judge(domain, folder)


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
        self._write_looks(self._testbed.checks)
        record = RunRecord(
            self._domain,
            self._plan,
            injections=self._injections,
            deaths=self._deaths,
            checks=self._testbed.checks,
        )
        found = verdict.judge(record, why)
        self._folder.write("verdict.json", found)
        return found

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


def judge(domain: Domain, folder: Folder) -> Verdict:
    """Judge the files of a run, and write the verdict beside them."""
    found = verdict.judge(folder.record(domain))
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
