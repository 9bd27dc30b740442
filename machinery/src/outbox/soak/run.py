"""A run: start the chain, let clients and nemesis loose, heal everything, wait, read what was left, judge it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from outbox.audit import check
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.soak import observe, verdict
from outbox.soak.clients import Clients
from outbox.soak.domain import Domain, Refuser
from outbox.soak.faults import Make
from outbox.soak.folder import Folder, Plan
from outbox.soak.history import Recorder
from outbox.soak.keeper import keeping
from outbox.soak.nemesis import Nemesis
from outbox.soak.testbed import Testbed
from outbox.soak.verdict import Verdict

SETTLE_TIMEOUT_S = 300.0
Report = Callable[[str], None]


def soak(  # noqa: PLR0917 - each is one thing of a run
    settings: Settings, domain: Domain, plan: Plan, faults: Mapping[str, Make], folder: Folder, report: Report
) -> Verdict:
    """Run the plan on a new stack in the home folder of the settings, and judge it.

    A run that breaks off has the verdict `unknown`. Nothing of it runs when this returns or raises.
    """
    testbed = Testbed(settings, domain.sinks, domain.refusals if isinstance(domain, Refuser) else {})
    began_s = time.monotonic()

    def say(text: str) -> None:
        report(f"{time.monotonic() - began_s:6.0f} s  {text}")

    folder.write("run.json", plan)
    recorder = Recorder(folder.history_file)
    try:
        testbed.start(say)
        clients = Clients(testbed.stack.through("client-service"), domain, recorder, plan.rate, plan.seed)
        clients.set_up()
        breaker = Nemesis(testbed, faults, plan.seed, say)
        say(f"faults begin, for {plan.duration_s:.0f} s")
        with keeping(testbed, say):
            clients.start()
            try:
                breaker.run(plan.duration_s, plan.pause_s, clients.require_running)
            finally:
                folder.write("injections.json", breaker.injections)
            clients.stop()
            if breaker.not_happened:
                say(f"have never happened: {', '.join(breaker.not_happened)}")
            say("every fault is healed; waiting until the sinks have applied everything")
            problem = _settle(testbed.settings)
        if problem:
            return _unknown(folder, problem)
        seen = observe.read(testbed.settings, domain, testbed.sink_names)
        folder.write("seen.json", replace(seen, released=testbed.released))
    except (Failure, TimeoutError) as error:
        return _unknown(folder, str(error))
    finally:
        recorder.close()
        testbed.stop()
    return judge(domain, folder)


def judge(domain: Domain, folder: Folder) -> Verdict:
    """Judge the files of a run, and write the verdict beside them."""
    found = verdict.judge(
        domain, folder.history, folder.seen, folder.injections, may_repeat=not folder.plan.exactly_once
    )
    folder.write("verdict.json", found)
    return found


def _settle(settings: Settings) -> str:
    """Wait until nothing is in flight; what is wrong with that, if it does not come to be."""
    try:
        check.check_settled(settings, SETTLE_TIMEOUT_S)
    except (Failure, TimeoutError) as error:
        return str(error)
    return ""


def _unknown(folder: Folder, why: str) -> Verdict:
    found = replace(Verdict("unknown"), why_unknown=why)
    folder.write("verdict.json", found)
    return found
