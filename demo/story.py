"""The walkthrough: a phase without faults, three that break the chain on purpose, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal

from demo.crash import kill_before_offsets, wait_replayed
from demo.screen import Screen
from demo.traffic import Traffic
from demo.workload import NAIVE, RIGHT, Workload
from outbox.audit import check
from outbox.audit.quantity import text_of
from outbox.audit.report import Report
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.kafka import topics
from outbox.migrations.migrate import migrate
from outbox.relay import apply as relay
from outbox.sink import spec
from outbox.stack.command import service, sink
from outbox.stack.stack import Stack

REQUESTS_QUIET = 600
REQUESTS_FAULT = 1000
REQUESTS_BURST = 300
SETTLE_TIMEOUT_S = 120.0
PUBLISHED_EVENTS = 200  # what a worker has published before it is killed
BACKLOG_EVENTS = 20  # and what it has not
RESENT = "sink B drifts, key by key, by exactly the sum of the resent events"


@dataclass(frozen=True)
class Phase:
    """A line of the verdict: the duplicates of the phase, and the drifts at its end."""

    name: str
    topic_duplicates: int
    skipped: int  # duplicates that the right sink skipped
    drift_right: Decimal
    drift_naive: Decimal | None
    drifting_keys: int


@dataclass(frozen=True)
class Burst:
    """Traffic as the source recorded it: events, and the change of each key's total."""

    events: int
    change: dict[str, Decimal]


class Story:
    """Plays the phases on a stack of its own and reports them. ``screen.failed`` is the first expectation not met."""

    def __init__(self, settings: Settings, screen: Screen, seed: int) -> None:
        self._stack = Stack(settings)
        self._screen = screen
        self._seed = seed
        known = spec.sinks(settings)
        self._names = [name for name in (RIGHT, NAIVE) if name in known]
        self._topics = known[RIGHT].topics
        self._phases: list[Phase] = []
        self._stop_traffic: Callable[[], None] = lambda: None

    def play(self) -> None:
        """Play all phases, from an empty stack to the verdict."""
        self._set_up()
        self._traffic = Traffic(self._settings, Workload(self._seed), needs=self._service.require_running)
        self._stop_traffic = self._traffic.stop
        self._all_well()
        self._at_least_once()
        self._exactly_once()
        self._beyond_kafka()
        self._verdict()

    def tear_down(self) -> None:
        """Leave nothing running. The data stays, so that it can be inspected."""
        self._stop_traffic()
        self._stack.down(report=self._screen.progress)

    # Phases -------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self._screen.title("The chain: service → Postgres → Debezium → Kafka → PySpark sinks")
        self._stack.up(report=self._screen.progress)
        self._settings = self._stack.settings
        migrate(self._settings)
        self._screen.progress("databases migrated")
        relay.apply(self._settings)
        self._screen.progress(f"connector applied: {relay.status(self._settings).mode}")
        self._sinks = sink(self._settings, *self._names)
        self._service = service(self._settings)
        self._service.spawn()
        self._sinks.spawn()
        self._service.wait_ready()
        self._screen.progress(f"service on http://{self._settings.service_host}:{self._settings.service_port}")
        self._sinks.wait_ready()
        ideas = {RIGHT: f"A `{RIGHT}` (remembers event ids)", NAIVE: f"B `{NAIVE}` (adds up whatever comes)"}
        self._screen.progress(f"streaming: sink {', sink '.join(ideas[name] for name in self._names)}")

    def _all_well(self) -> None:
        self._screen.title("1. No faults")
        self._screen.say(f"Sending {REQUESTS_QUIET} requests, invalid ones among them, after those that set things up.")
        self._traffic.set_up()
        self._traffic.run(REQUESTS_QUIET)
        report = self._settle()
        self._screen.expect(not self._traffic.surprises, "every request got the expected response", self._answers())
        self._screen.expect(
            report.outbox_events == self._traffic.events > 0,
            "each successful request wrote its events, no other wrote any",
            f"{report.outbox_events} in the outbox, {self._traffic.events} expected",
        )
        self._screen.expect(report.duplicates == 0, "no duplicate on the topic", _found(report))
        self._expect_right(report)
        self._expect_naive(report, {}, "sink B agrees with the source")
        self._remember("1 no faults", report)

    def _at_least_once(self) -> None:
        self._screen.title("2. Exactly-once off; the Connect worker is killed (kill -9) while it relays")
        self._switch(exactly_once=False)
        self._kill_worker_midstream()
        report = self._settle()
        added = report.duplicates - self._last.duplicates
        self._screen.expect(
            added > 0, "the fault fired: Debezium resent events whose offsets were not stored", _found(report)
        )
        self._expect_nothing_lost(report)
        self._expect_right(report)
        self._expect_naive(report, self._repeated(report), RESENT)
        self._remember("2 worker killed, exactly-once off", report)

    def _exactly_once(self) -> None:
        self._screen.title("3. Exactly-once on; the worker is killed again")
        self._switch(exactly_once=True)
        self._kill_worker_midstream()
        report = self._settle()
        added = report.duplicates - self._last.duplicates
        self._screen.expect(added == 0, "no new duplicate on the topic", _found(report))
        self._expect_nothing_lost(report)
        self._expect_right(report)
        self._expect_naive(report, self._repeated(report), RESENT)
        self._remember("3 worker killed, exactly-once on", report)

    def _beyond_kafka(self) -> None:
        self._screen.title("4. Exactly-once still on; the sinks are killed between their database commit and Spark's")
        self._screen.say("consume → write → CRASH → restart → process the same batch again")
        self._crash_sinks()
        report = self._settle()
        self._screen.expect(report.duplicates == self._last.duplicates, "no new duplicate on the topic", _found(report))
        self._expect_nothing_lost(report)
        skipped = report.sink(RIGHT).duplicates - self._last.sink(RIGHT).duplicates
        self._screen.expect(
            skipped == self._replayed.events > 0,
            "sink A skips every event of the batch that it had applied",
            f"{skipped} skipped",
        )
        self._expect_right(report)
        change = self._replayed.change
        if NAIVE in self._names:
            self._screen.expect(bool(change), "that batch changes totals", f"of {len(change)} keys")
        drift = _plus(self._repeated(report), change)
        self._expect_naive(report, drift, "sink B drifts further, key by key, by exactly that batch")
        self._remember("4 sinks killed after their commit", report)

    def _verdict(self) -> None:
        self._screen.title("5. Verdict")
        rows = [
            [
                phase.name,
                phase.topic_duplicates,
                phase.skipped,
                text_of(phase.drift_right),
                *([] if phase.drift_naive is None else [text_of(phase.drift_naive), phase.drifting_keys]),
            ]
            for phase in self._phases
        ]
        header = ["phase", "new duplicates on topic", "skipped by A", "drift of A"]
        header += ["drift of B", "drifting keys"] if NAIVE in self._names else []
        self._screen.table(header, rows)
        self._screen.say("")
        self._screen.say(
            "Debezium delivers at least once. Connect's exactly-once covers Debezium → Kafka only.\n"
            "Sink A stays right under every fault, because it writes event id and result in one transaction."
        )

    # Faults -------------------------------------------------------------------------------------------------------

    def _switch(self, exactly_once: bool) -> None:
        self._stack = Stack(self._settings.model_copy(update={"exactly_once": exactly_once}))
        self._stack.up(["connect"], report=self._screen.progress)
        self._settings = self._stack.settings
        relay.apply(self._settings)
        mode = relay.status(self._settings).mode
        wanted = "exactly-once" if exactly_once else "at-least-once"
        self._screen.expect(mode.startswith(wanted), "the effective mode, as reported by Connect", mode)

    def _kill_worker_midstream(self) -> None:
        """Under load, freeze the worker until events pile up behind it, kill it, and restart it."""
        worker = self._stack.part("connect")
        published = self._published()
        finish = self._traffic.start(REQUESTS_FAULT)

        def enough() -> None:
            worker.require_running()
            self._traffic.require_events(PUBLISHED_EVENTS + BACKLOG_EVENTS)

        wait_for(
            "the worker to publish",
            lambda: self._published() >= published + PUBLISHED_EVENTS,
            timeout_s=60,
            needs=enough,
        )
        worker.pause()
        wait_for(
            "events of requests that Workload.plan() returns to pile up",
            lambda: self._unrelayed() >= BACKLOG_EVENTS,
            timeout_s=60,
        )
        unrelayed, pid = self._unrelayed(), worker.pid()
        worker.kill()
        self._screen.expect(
            not worker.is_running() and unrelayed > 0,
            "the worker was killed while it relayed",
            f"kill -9 {pid} with {unrelayed} events not yet relayed",
        )
        worker.start()
        self._screen.progress("worker restarted")
        finish()

    def _crash_sinks(self) -> None:
        """Kill the sinks inside their window. A burst arrives while they are stopped, so one batch holds it."""
        self._sinks.stop()
        self._replayed = self._burst()
        crashes = kill_before_offsets(self._sinks, self._names, self._settings)
        for name, crash in crashes.items():
            self._screen.expect(
                crash.fired,
                f"sink {name} was killed in the window",
                f"its database has batch {crash.planned_batch}, Spark recorded {crash.committed_batch} as its last",
            )
        self._sinks.start()
        for name, crash in crashes.items():
            wait_replayed(self._sinks, name, self._settings, crash)

    def _burst(self) -> Burst:
        """Send traffic that nobody reads yet. Return how many events it caused, and the change of each key's total."""
        before = self._relayed()
        self._traffic.run(REQUESTS_BURST)
        after = self._relayed()
        events = self._outbox_events(after) - self._outbox_events(before)
        return Burst(events, _minus(self._totals(after), self._totals(before)))

    # Looking ------------------------------------------------------------------------------------------------------

    def _settle(self) -> Report:
        report = check.check_settled(self._settings, SETTLE_TIMEOUT_S, needs=self._require_chain)
        self._screen.progress(f"nothing is in flight: {_found(report)}")
        return report

    def _require_chain(self) -> None:
        """Raises Failure with the end of its log if a process has ended that brings events to the sinks' tables."""
        self._stack.part("connect").require_running()
        self._sinks.require_running()

    def _relayed(self) -> Report:
        """Wait until the whole outbox is on the topic."""
        seen: list[Report] = []

        def relayed() -> bool:
            seen[:] = [check.check(self._settings)]
            return seen[0].in_flight == 0

        needs = self._stack.part("connect").require_running
        wait_for("the outbox to be relayed", relayed, timeout_s=SETTLE_TIMEOUT_S, poll_s=0.2, needs=needs)
        return seen[0]

    def _published(self) -> int:
        names = catalog.of(self._settings).topics
        return sum(sum(topics.last_stable_offsets(self._settings, name).values()) for name in names)

    def _unrelayed(self) -> int:
        return check.check(self._settings).in_flight

    def _outbox_events(self, report: Report) -> int:
        """How many events of the sinks' topics the outbox has."""
        return sum(report.topic(topic).outbox_events for topic in self._topics)

    def _totals(self, report: Report) -> Mapping[str, Decimal]:
        """By key, the source's totals that the sinks are compared with."""
        return report.sink(RIGHT).comparisons[0].totals

    def _repeated(self, report: Report) -> Mapping[str, Decimal]:
        """By key, what the duplicates on the topics add up to."""
        return report.sink(RIGHT).comparisons[0].repeated

    def _expect_nothing_lost(self, report: Report) -> None:
        missing = report.missing_versions
        found = f"{report.outbox_events} in the outbox, {len(report.lost)} lost, {missing} versions missing"
        self._screen.expect(not report.lost and missing == 0, "nothing is lost", found)

    def _expect_right(self, report: Report) -> None:
        drift = report.sink(RIGHT).drift_total
        self._screen.expect(drift == 0, "sink A agrees with the source", f"drift {text_of(drift)}")

    def _expect_naive(self, report: Report, drift: Mapping[str, Decimal], what: str) -> None:
        """Sink B is off by this signed drift, in every key."""
        if NAIVE in self._names:
            found = report.sink(NAIVE)
            detail = f"{text_of(found.drift_total)} in {len(found.drift)} keys"
            self._screen.expect(found.drift == _plus(drift, {}), what, detail)

    def _remember(self, name: str, report: Report) -> None:
        naive = report.sink(NAIVE) if NAIVE in self._names else None
        self._phases.append(
            Phase(
                name=name,
                topic_duplicates=report.duplicates - sum(phase.topic_duplicates for phase in self._phases),
                skipped=report.sink(RIGHT).duplicates - sum(phase.skipped for phase in self._phases),
                drift_right=report.sink(RIGHT).drift_total,
                drift_naive=naive.drift_total if naive else None,
                drifting_keys=len(naive.drift) if naive else 0,
            )
        )
        self._last = report

    def _answers(self) -> str:
        if self._traffic.surprises:
            return self._traffic.surprises[0]
        return ", ".join(f"{count} × {kind}" for kind, count in sorted(self._traffic.answered.items()))


def _found(report: Report) -> str:
    return f"{report.duplicates} duplicates in {report.records} events"


def _plus(left: Mapping[str, Decimal], right: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """The sums that are not zero, by key."""
    return _minus(left, {key: -value for key, value in right.items()})


def _minus(left: Mapping[str, Decimal], right: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """The differences that are not zero, by key."""
    differences = {key: left.get(key, Decimal(0)) - right.get(key, Decimal(0)) for key in {*left, *right}}
    return {key: difference for key, difference in differences.items() if difference}
