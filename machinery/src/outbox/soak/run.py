"""A run: start the chain, let clients and nemesis loose, heal everything, wait, read what was left, judge it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from outbox.audit import check
from outbox.audit.report import Report as CheckReport
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.relay import connectors
from outbox.soak import captures, checked, observe, verdict
from outbox.soak.checked import Checked
from outbox.soak.clients import Clients
from outbox.soak.death import Death
from outbox.soak.domain import Domain, Forger, Refuser, Released, clustered_of
from outbox.soak.faults import Make
from outbox.soak.folder import Folder, Plan
from outbox.soak.history import Recorder
from outbox.soak.injection import Injection
from outbox.soak.keeper import keeping
from outbox.soak.nemesis import Nemesis
from outbox.soak.progress import Progress, sparse
from outbox.soak.testbed import Testbed
from outbox.soak.verdict import Record, Verdict

STUCK_S = 300.0  # so long nothing that is in flight arrives: then the run is judged as it is
Report = Callable[[str], None]


def soak(  # noqa: PLR0917 - each is one thing of a run
    settings: Settings, domain: Domain, plan: Plan, faults: Mapping[str, Make], folder: Folder, report: Report
) -> Verdict:
    """Run the plan on a new stack in the home folder of the settings, and judge it.

    A run of which nobody can read what was left is judged by its faults, the ends of processes and the checks so far:
    `unknown`, or `invalid`. Nothing of it runs when this returns or raises.
    """
    testbed = Testbed(
        settings,
        domain.sinks,
        domain.refusals if isinstance(domain, Refuser) else {},
        clustered_of(domain),
        forge=domain.foreign_event if isinstance(domain, Forger) else None,
        older=domain.older if isinstance(domain, Released) else None,
    )
    began_s = time.monotonic()

    def say(text: str) -> None:
        report(f"{time.monotonic() - began_s:6.0f} s  {text}")

    captures.require_copies(testbed.settings, domain, testbed.sink_specs)
    folder.write("run.json", plan)
    recorder = Recorder(folder.history_file)
    injections: list[Injection] = []
    deaths: list[Death] = []
    try:
        for make in faults.values():
            make().prepare(testbed)
        testbed.start(say)
        clients = Clients(testbed.stack.through("client-service"), domain, recorder, plan.rate, plan.seed)
        clients.set_up()
        breaker = Nemesis(testbed, faults, plan.seed, say)
        progress = Progress(recorder, breaker, say)

        def watch() -> None:
            clients.require_running()
            progress()

        say(f"faults begin, for {plan.duration_s:.0f} s")
        with keeping(testbed, say) as deaths:
            try:
                with clients.sending():
                    breaker.run(plan.duration_s, plan.pause_s, watch)
            finally:
                injections = breaker.injections
                folder.write("injections.json", injections)
            say(f"{progress.text}; waiting until the sinks have applied everything")
            last = _settled(testbed.settings, say)
        folder.write("checks.json", [*testbed.checks, last])
        folder.write("deaths.json", deaths)
        foreign = [record for one in injections for record in one.foreign]
        seen = observe.read(testbed.settings, domain, testbed.sink_names, foreign, testbed.dropped)
        released = {one.topic: testbed.released[one.kind] for one in testbed.captures}
        folder.write_seen(replace(seen, released=testbed.released[connectors.OUTBOX], released_changes=released))
    except (Failure, TimeoutError) as error:
        record = Record(
            injections=injections,
            deaths=deaths,
            checks=testbed.checks,
            selected=plan.faults,
            timeout_scale=plan.timeout_scale,
        )
        found = verdict.broken_off(record, str(error))
        folder.write("verdict.json", found)
        return found
    except KeyboardInterrupt:
        say("interrupted: everything is stopped, and there is no verdict")
        raise
    finally:
        recorder.close()
        testbed.stop()
    return judge(domain, folder)


def judge(domain: Domain, folder: Folder) -> Verdict:
    """Judge the files of a run, and write the verdict beside them."""
    found = verdict.judge(domain, folder.record)
    folder.write("verdict.json", found)
    return found


def _settled(settings: Settings, report: Report) -> Checked:
    """Wait until nothing is in flight, for as long as it becomes less, and return the last check.

    It says what is in flight if the sinks stand still. Raises Failure if a part is unavailable.
    """
    before = math.inf
    while True:
        try:
            done = check.check_settled(settings, STUCK_S, progress=sparse(report))
        except check.InFlightError as error:
            if _in_flight(error.report) >= before:
                return checked.of_report("at the end", error.report.as_dict(), error.report.in_flight_text)
            before = _in_flight(error.report)
            report(f"in flight: {error.report.in_flight_text}")
        else:
            return checked.of_report("at the end", done.as_dict(), "" if done.settled else done.in_flight_text)


def _in_flight(report: CheckReport) -> int:
    return report.in_flight + sum(sink.in_flight for sink in report.sinks)
