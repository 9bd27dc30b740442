"""The walkthrough: a phase without faults, three that break the chain on purpose, and a verdict.

It is told on any chain, also on one that has data: each expectation compares with what was there at the beginning.
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from outbox.audit import check
from outbox.audit.declared import text_of
from outbox.audit.report import ComparisonReport, Report, sum_of_sizes
from outbox.base import project
from outbox.base.errors import Failure, plural
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.kafka import topics
from outbox.relay import lifecycle
from outbox.relay.rest import Rest
from outbox.sink import discovery
from outbox_lab.walkthrough.chain import Chain
from outbox_lab.walkthrough.faults import crash_sinks
from outbox_lab.walkthrough.traffic import Traffic
from outbox_lab.walkthrough.workload import Workload

REQUESTS_QUIET = 600
REQUESTS_FAULT = 1000
REQUESTS_BURST = 300
SETTLE_TIMEOUT_S = 120.0
PUBLISHED_EVENTS = 200  # what a worker has published before it is killed
BACKLOG_EVENTS = 20  # and what it has not
RESENT = "sink B drifts, key by key, by exactly the sum of the resent events"


class Screen:
    """Writes to standard output. Remembers the first expectation that did not hold."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._color = sys.stdout.isatty()
        self.failed: str | None = None

    def title(self, text: str) -> None:
        """A new step of the story."""
        self._line("")
        self._line(self._paint("1", f"[{time.monotonic() - self._started_at:5.1f} s] {text}"))

    def say(self, text: str) -> None:
        """A fact: what happens, or why."""
        for line in text.splitlines():
            self._line(f"    {line}")

    def progress(self, text: str) -> None:
        """A step of long work."""
        self._line(self._paint("2", f"      · {text}"))

    def expect(self, held: bool, claim: str, found: str) -> None:
        """An expectation: shown with what was found, and remembered if it did not hold."""
        mark = self._paint("32", "✔") if held else self._paint("31", "✘")
        self._line(f"    {mark} {claim}: {found}")
        if not held and self.failed is None:
            self.failed = f"{claim}: {found}"

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table: the first column is left-aligned, the numbers are right-aligned."""
        cells = [[str(cell) for cell in row] for row in (header, *rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for number, row in enumerate(cells):
            first, *others = (
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            self._line("    " + "   ".join([first, *others]))
            if number == 0:
                self._line("    " + "   ".join("─" * width for width in widths))

    def _paint(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color else text

    def _line(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


@dataclass(frozen=True)
class Phase:
    """A line of the verdict: the duplicates of the phase, and the drifts at its end."""

    name: str
    topic_duplicates: int  # of events that the right sink reads
    skipped: int  # duplicates that the right sink skipped
    drift_right: Decimal
    drift_naive: Decimal | None
    drifting_keys: int


@dataclass(frozen=True)
class Step:
    """A step of the story. ``play`` does and shows it; steps are played once each, in their order."""

    title: str
    play: Callable[[], None]


class Story:
    """Plays the phases on a chain and reports them. ``screen.failed`` is the first expectation not met.

    A chain may have had one before: another story compares with what is there when it begins.
    """

    def __init__(self, chain: Chain, workload: Workload, screen: Screen) -> None:
        self.chain = chain
        self.workload = workload
        self._screen = screen
        self._names = watched(discovery.sinks(chain.settings), workload)
        self._naive = self._names[1] if len(self._names) > 1 else None
        self._right = discovery.sinks(chain.settings)[workload.right]
        self.phases: list[Phase] = []  # those that were played, in their order
        self._stop_traffic: Callable[[], None] = lambda: None

    @property
    def steps(self) -> list[Step]:
        """The whole story, from the start of the chain to the verdict."""
        return [
            Step("The chain: service → Postgres → Debezium → Kafka → PySpark sinks", self._set_up),
            Step("1. No faults", self._all_well),
            Step("2. Exactly-once off; the Connect worker is killed (kill -9) while it relays", self._at_least_once),
            Step("3. Exactly-once on; the worker is killed again", self._exactly_once),
            Step(
                "4. Exactly-once still on; the sinks are killed between their database commit and Spark's",
                self._beyond_kafka,
            ),
            Step("5. Verdict", self._verdict),
        ]

    def play(self) -> None:
        """Play all steps."""
        for step in self.steps:
            self._screen.title(step.title)
            step.play()

    def stop(self) -> None:
        """Stop the traffic, and resume the parts that a step has frozen. The chain, which has started, goes on."""
        self._stop_traffic()
        for part in (self.chain.worker, self.chain.sinks):
            part.resume()

    def tear_down(self) -> None:
        """Stop the traffic, and leave the chain as it was."""
        self._stop_traffic()
        self.chain.restore(self._screen.progress)

    # Phases -------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        self.chain.start(self._screen.progress)
        ideas = {self.workload.right: f"A `{self.workload.right}` (remembers event ids)"}
        ideas |= {str(self.workload.naive): f"B `{self.workload.naive}` (adds up whatever comes)"}
        self._screen.progress(f"streaming: sink {', sink '.join(ideas[name] for name in self._names)}")
        self._first = self._last = check.check_settled(self.chain.settings, SETTLE_TIMEOUT_S, needs=self._require_chain)
        if self._first.records:
            self._screen.progress(
                f"the chain has {plural(self._first.records, 'event')}: what follows is compared with now"
            )
        self._traffic = Traffic(self.chain.settings, self.workload, needs=self.chain.service.require_running)
        self._stop_traffic = self._traffic.stop

    def _all_well(self) -> None:
        self._screen.say(f"Sending {REQUESTS_QUIET} requests, invalid ones among them, after those that set things up.")
        self._traffic.set_up()
        self._traffic.run(REQUESTS_QUIET)
        report = self._settle()
        written, traffic = report.outbox_events - self._first.outbox_events, self._traffic
        answers = ", ".join(f"{count} × {kind}" for kind, count in sorted(traffic.answered.items()))
        found = traffic.surprises[0] if traffic.surprises else answers
        self._screen.expect(not traffic.surprises, "every request got the expected response", found)
        claim = "each successful request wrote its events, no other wrote any"
        found = f"{written} in the outbox, {traffic.events} expected"
        self._screen.expect(written == traffic.events > 0, claim, found)
        self._screen.expect(self._added(report) == 0, "no duplicate on the topic", self._found(report))
        self._end_phase("1 no faults", report, {}, "sink B agrees with the source")

    def _at_least_once(self) -> None:
        if self._mode().startswith("at-least-once"):
            # Connect stores offsets once a minute, and when a task ends: then what is resent is of this phase alone.
            Rest(self.chain.settings).restart_task()
        else:
            self.chain.switch(exactly_once=False, report=self._screen.progress)
        self._expect_mode("at-least-once")
        self._kill_worker_midstream()
        report = self._settle()
        claim = "the fault fired: Debezium resent events whose offsets were not stored"
        self._screen.expect(self._added(report) > 0, claim, self._found(report))
        self._expect_nothing_lost(report)
        resent, skipped = self._resent(report), self._skipped(report)
        found = f"{skipped} of {resent} on its topics"
        self._screen.expect(resent == skipped, "sink A skips every one that it reads", found)
        self._end_phase("2 worker killed, exactly-once off", report, self._repeated(report), RESENT)

    def _exactly_once(self) -> None:
        self._expect_mode("exactly-once")
        self._kill_worker_midstream()
        report = self._settle()
        self._screen.expect(self._added(report) == 0, "no new duplicate on the topic", self._found(report))
        self._expect_nothing_lost(report)
        self._end_phase("3 worker killed, exactly-once on", report, self._repeated(report), RESENT)

    def _beyond_kafka(self) -> None:
        self._screen.say("consume → write → CRASH → restart → process the same batch again")
        self._crash_sinks()
        report = self._settle()
        self._screen.expect(self._added(report) == 0, "no new duplicate on the topic", self._found(report))
        self._expect_nothing_lost(report)
        skipped = self._skipped(report)
        claim = "sink A skips every event of the batch that it had applied"
        self._screen.expect(skipped == self._burst_events > 0, claim, f"{skipped} skipped")
        change = self._burst_change
        if self._naive:
            self._screen.expect(bool(change), "that batch changes totals", f"of {len(change)} keys")
        drift = _plus(self._repeated(report), change)
        claim = "sink B drifts further, key by key, by exactly that batch"
        self._end_phase("4 sinks killed after their commit", report, drift, claim)

    def _verdict(self) -> None:
        rows = [
            [
                phase.name,
                phase.topic_duplicates,
                phase.skipped,
                text_of(phase.drift_right),
                *([] if phase.drift_naive is None else [text_of(phase.drift_naive), phase.drifting_keys]),
            ]
            for phase in self.phases
        ]
        header = ["phase", "new duplicates on topic", "skipped by A", "drift of A"]
        header += ["drift of B", "drifting keys"] if self._naive else []
        self._screen.table(header, rows)
        self._screen.say("")
        self._screen.say(
            "Debezium delivers at least once. Connect's exactly-once covers Debezium → Kafka only.\n"
            "Sink A stays right under every fault, because it writes event id and result in one transaction."
        )

    # Faults -------------------------------------------------------------------------------------------------------

    def _mode(self) -> str:
        return lifecycle.status(self.chain.settings).mode

    def _expect_mode(self, wanted: str) -> None:
        mode = self._mode()
        self._screen.expect(mode.startswith(wanted), "the effective mode, as reported by Connect", mode)

    def _kill_worker_midstream(self) -> None:
        """Under load, freeze the worker until events pile up behind it, kill it, and restart it with exactly-once.

        The mode of the killed worker decides what is resent: it has stored an offset with each event, or later.
        """
        worker = self.chain.worker
        published = self.published_events()
        finish = self._traffic.start(REQUESTS_FAULT)

        def enough(relayed: int) -> None:
            worker.require_running()
            self._traffic.require_events(relayed + BACKLOG_EVENTS)

        wait_for(
            "the worker to publish",
            lambda: self.published_events() >= published + PUBLISHED_EVENTS,
            timeout_s=60,
            needs=lambda: enough(PUBLISHED_EVENTS),
        )
        worker.pause()
        relayed = self.published_events() - published
        wait_for(
            "events of requests that Workload.plan() returns to pile up",
            lambda: self.unrelayed_events() >= BACKLOG_EVENTS,
            timeout_s=60,
            needs=lambda: enough(relayed),
        )
        unrelayed, pid = self.unrelayed_events(), worker.pid()
        self.chain.request(exactly_once=True)
        worker.kill()
        self._screen.expect(
            not worker.is_running() and unrelayed > 0,
            "the worker was killed while it relayed",
            f"kill -9 {pid} with {unrelayed} events not yet relayed",
        )
        self.chain.start_worker(self._screen.progress)
        self._screen.progress("the worker runs again, with exactly-once on")
        finish()

    def _crash_sinks(self) -> None:
        """Kill the sinks inside their window. A burst arrives while they wait, so one batch holds it."""
        for name, crash in crash_sinks(self.chain, self._names, self._burst).items():
            self._screen.expect(
                crash.fired,
                f"sink {name} was killed in the window",
                f"its database has batch {crash.planned_batch}, Spark recorded {crash.committed_batch} as its last",
            )

    def _burst(self) -> None:
        """Send traffic that nobody reads yet. Remember its events, and the change of each key's total."""

        def relayed() -> Report | None:
            report = check.check(self.chain.settings)
            return None if report.in_flight else report

        self._traffic.run(REQUESTS_BURST)
        needs, what = self.chain.worker.require_running, "the outbox to be relayed"
        after = wait_for(what, relayed, timeout_s=SETTLE_TIMEOUT_S, poll_s=0.2, needs=needs)
        before = self._last
        counts = [(after.topic(name).outbox_events, before.topic(name).outbox_events) for name in self._right.topics]
        self._burst_events = sum(now - then for now, then in counts)
        self._burst_change = _minus(self._of_totals(after).totals, self._of_totals(before).totals)

    # Looking ------------------------------------------------------------------------------------------------------

    def _settle(self) -> Report:
        report = check.check_settled(self.chain.settings, SETTLE_TIMEOUT_S, needs=self._require_chain)
        self._screen.progress(f"nothing is in flight: {self._found(report)}")
        return report

    def _require_chain(self) -> None:
        """Raises Failure with its log if a process has ended that brings events to the sinks' tables."""
        self.chain.worker.require_running()
        self.chain.sinks.require_running()

    def published_events(self) -> int:
        names = catalog.of_project(self.chain.settings).topics
        return sum(sum(topics.last_stable_offsets(self.chain.settings, name).values()) for name in names)

    def unrelayed_events(self) -> int:
        return check.check(self.chain.settings).in_flight

    # Comparing with the beginning ---------------------------------------------------------------------------------

    def _found(self, report: Report) -> str:
        """The duplicates on the topics."""
        duplicates, records = (getattr(report, name) - getattr(self._first, name) for name in ("duplicates", "records"))
        return f"{duplicates} duplicates in {records} events"

    def _added(self, report: Report) -> int:
        """How many duplicates a phase has added to the topics."""
        return report.duplicates - self._last.duplicates

    def _resent(self, report: Report) -> int:
        """How many duplicates of events that the right sink reads a phase has added."""
        return self._duplicates_for_right(report) - self._duplicates_for_right(self._last)

    def _duplicates_for_right(self, report: Report) -> int:
        return sum(
            duplicates
            for topic, decoder in self._right.decoders.items()
            for event, duplicates in report.topic(topic).repeated.items()
            if event in decoder.wanted_versions
        )

    def _skipped(self, report: Report) -> int:
        """How many duplicates the right sink has skipped in a phase."""
        return report.sink(self.workload.right).duplicates - self._last.sink(self.workload.right).duplicates

    def _repeated(self, report: Report) -> Mapping[str, Decimal]:
        """By key, what the duplicates on the topics add up to."""
        return _minus(self._of_totals(report).repeated, self._of_totals(self._first).repeated)

    def _of_totals(self, report: Report) -> ComparisonReport:
        """The first comparison of the right sink that compares totals. Raises Failure without one."""
        for one in report.sink(self.workload.right).comparisons:
            if one.rows is None:
                return one
        raise Failure(
            f"sink {self.workload.right} has no comparison of totals, which the walkthrough adds up",
            "write one beside its comparisons of rows (docs/projections.md)",
            code="comparison-missing",
        )

    def _expect_nothing_lost(self, report: Report) -> None:
        lost = len(report.lost) - len(self._first.lost)
        missing = report.count("versions-missing") - self._first.count("versions-missing")
        events = report.outbox_events - self._first.outbox_events
        found = f"{events} in the outbox, {lost} lost, {missing} versions missing"
        self._screen.expect(lost == 0 and missing == 0, "nothing is lost", found)

    def _drift_total(self, report: Report, sink: str) -> Decimal:
        """The sum of the absolute drifts of all comparisons, since the beginning."""
        now, first = report.sink(sink), self._first.sink(sink)
        drifts = [_minus(one.drift, first.comparison(one.name).drift) for one in now.comparisons]
        return sum_of_sizes(difference for drift in drifts for difference in drift.values())

    def _end_phase(self, name: str, report: Report, drift: Mapping[str, Decimal], claim: str) -> None:
        """Compare both sinks with the source, and add a line to the verdict. Sink B is off by this signed drift, in
        every key.
        """
        right, naive = self.workload.right, self._naive
        drift_right = self._drift_total(report, right)
        rows = sum(one.differences.count for one in report.sink(right).comparisons)
        found_right = f"drift {text_of(drift_right)}" + (f", {plural(rows, 'row')} differ" if rows else "")
        self._screen.expect(drift_right == 0 and not rows, "sink A agrees with the source", found_right)
        drift_naive, found = None, dict[str, Decimal]()
        if naive:
            drift_naive = self._drift_total(report, naive)
            found = _minus(report.sink(naive).drift, self._first.sink(naive).drift)
            self._screen.expect(found == _plus(drift, {}), claim, f"{text_of(drift_naive)} in {len(found)} keys")
        resent, skipped = self._resent(report), self._skipped(report)
        self.phases.append(Phase(name, resent, skipped, drift_right, drift_naive, drifting_keys=len(found)))
        self._last = report


def watched(known: Mapping[str, object], workload: Workload) -> list[str]:
    """The sinks that the walkthrough watches: the right one, and the naive one if the project has it.

    Raises Failure if the project has no sink of the right one's name.
    """
    if workload.right not in known:
        raise Failure(
            f"the workload watches the sink {workload.right!r}, and the sinks are {', '.join(known)}",
            "correct `right` of the workload",
            code="sink-unknown",
        )
    return [name for name in (workload.right, workload.naive) if name is not None and name in known]


def _plus(left: Mapping[str, Decimal], right: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """The sums that are not zero, by key."""
    return _minus(left, {key: -value for key, value in right.items()})


def _minus(left: Mapping[str, Decimal], right: Mapping[str, Decimal]) -> dict[str, Decimal]:
    """The differences that are not zero, by key."""
    differences = {key: left.get(key, Decimal(0)) - right.get(key, Decimal(0)) for key in {*left, *right}}
    return {key: difference for key, difference in differences.items() if difference}


class Player:
    """Plays the story on the terminal. ``player`` in ``[tool.outbox]`` names a subclass, as ``module:class``.

    One object plays one run of `outbox demo`; it is made without arguments. Whatever it shows elsewhere, the exit
    status of the command is decided by its ``screen``: the first expectation that did not hold. ``page`` is the host
    and port for a player that serves a page. A free port takes the place of a taken one.
    """

    page = ("127.0.0.1", 8090)

    def __init__(self) -> None:
        self.screen = Screen()

    def play(self, story: Story) -> None:
        """Play all steps, and return after the last."""
        story.play()

    def wait(self) -> None:
        """Called after the story unless it is played once: return when the user has seen enough. Ctrl-C interrupts."""
        signal.pause()

    def close(self) -> None:
        """Called once at the end, also after a failure, while the chain still runs: end what this player started."""


def load_player() -> Player:
    """The project's player; the terminal's, which says so, if the folder of the named one was deleted.

    Raises Failure if a player is named that cannot be made.
    """
    named = project.current().player
    if not named:
        return Player()
    module, _, attribute = named.partition(":")
    try:
        player: Player = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            player = Player()
            player.screen.say(f"there is no module {module}: the walkthrough is shown on the terminal only")
            return player
        raise Failure(
            f"the walkthrough found no player {named}: {error}",
            "write that class, or remove `player` from [tool.outbox] of pyproject.toml",
            code="player-missing",
        ) from error
    return player
