"""Operations of people and parts at random, on the real sink and on its model, which are compared after each: a minute
with a fixed seed; `make attack` for hours.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import engine
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outbox.base.settings import Settings
from outbox.sink.repair.replay import Selection
from tests.attack.model import SUM, Around, Event, Job, Record, Sink, day_of, real_id, real_uuid4
from tests.attack.world import NAME, World, attempt

MINUTE = 1_200  # steps
ROUND = 3_000  # steps between two lines of progress
EXAMPLE = 25  # steps
SHRINKING_S = 60

KEYS = ("a", "b", "c")
KINDS = (("placed", 1), ("placed", 1), ("placed", 2), ("cancelled", 1), ("paid", 1))
STRATEGIES = ("dedup", "merge", "versions", "upsert", "offsets", "naive")
EXACT = STRATEGIES[:4]  # the others apply what the topic repeats
FLAWS = ("not JSON", "schema violation", "key mismatch", "missing id", "malformed id")
NAMES = (("order",), ("order.placed",), ("order.placed.v1",), ("order.placed", "order.cancelled"), ("order.cancelled",))
CHANGES = ("note", "v2", "paid")
COUNTS = ("applied", "duplicates", "rejected", "filtered", "dead", "skipped")
TOMORROW_DAYS = 3  # how far a service's clock is ahead
FIRST_DAY = 60  # how many days ago an example begins


class Sent(NamedTuple):
    """A record that comes: a new event of a key and kind, one of those that were sent, or a malformed one."""

    what: str
    which: int
    key: str
    kind: tuple[str, int]


WHATS = ("new", "new", "new", "new from tomorrow", "again", "repeated version", *FLAWS)
CLEAN = ("new", "again")
number = st.integers(0, 40)
some = st.frozensets(number, min_size=1, max_size=3)
sent = st.builds(Sent, st.sampled_from(WHATS), number, st.sampled_from(KEYS), st.sampled_from(KINDS))
then = st.tuples(st.lists(sent, max_size=4), st.integers(0, 6))  # what comes behind it, and how much of it is delivered
names_of_jobs = st.sampled_from(NAMES)
likely = st.sampled_from((True, True, True, False))
declared = st.frozensets(st.sampled_from(CHANGES))
Then = tuple[Sequence[Sent], int]


class Planned(NamedTuple):
    """A rewind that waits at its prompt."""

    moves: Any
    begin: int


class Attack(RuleBasedStateMachine):
    """One sink, its topic and its source."""

    world: World
    steps = 0  # of all examples

    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        names=names_of_jobs,
        is_ordered=st.booleans(),
        has_transform=st.booleans(),
        is_clean=st.sampled_from((False, False, True)),
    )
    def begin(
        self, strategy: str, names: tuple[str, ...], is_ordered: bool, has_transform: bool, is_clean: bool
    ) -> None:
        """If it is clean, all records are events of the source, and stay: `check` is to find no other fault then."""
        self.has_transform, self.is_clean, self.is_exact = has_transform, is_clean, strategy in EXACT
        self.job = Job(names, frozenset(), strategy)
        self.world.begin(self.job, is_ordered=is_ordered, has_transform=has_transform)
        self.around = Around(is_ordered=is_ordered)
        self._set_clock(FIRST_DAY)
        self.sink = Sink(self.job)
        self.copy: Sink | None = None
        self.source: list[Event] = []
        self.pruned: set[str] = set()  # events of the source that the outbox has no more
        self.topic: list[Record] = []
        self.sent: list[Record] = []  # ever
        self.topic_number, self.first, self.made = 1, 0, 0
        self.is_running = self.is_superseded = False
        self.planned: Planned | None = None
        self._start()

    # The source, the topic and the driver ------------------------------------------------------------------------

    @rule(then=st.tuples(st.lists(sent, min_size=1, max_size=6), st.integers(1, 6)))
    def go_on(self, then: Then) -> None:
        self._go_on(then)

    @precondition(lambda self: not self.is_clean and self.source)
    @rule(which=number, is_rebuilt=st.booleans(), then=then)
    def restore_source(self, which: int, is_rebuilt: bool, then: Then) -> None:
        """Restore the source to an earlier state; half of the time the sink is rebuilt from it at once."""
        del self.source[which % len(self.source) :]
        self.is_exact = False  # what the source has forgotten may come again
        if is_rebuilt:
            self._rebuild_from_source()
        self._go_on(then)

    @precondition(lambda self: not self.is_clean and self.topic[self.first :])
    @rule(count=st.integers(1, 6), then=then)
    def drop_beginning(self, count: int, then: Then) -> None:
        self.world.stop()
        self.first = self.world.topic.first = min(len(self.topic), self.first + count)
        self._start()
        self._go_on(then)

    @precondition(lambda self: not self.is_clean and self.topic)
    @rule(is_accepted=likely, then=then)
    def recreate(self, is_accepted: bool, then: Then) -> None:
        """The topic is deleted and created again, and mostly a person accepts that."""
        self.world.stop()
        self.world.recreate()
        self.topic, self.first = [], 0
        self.topic_number += 1
        self._start()
        if is_accepted:
            self._accept_recreated()
        self._go_on(then)

    @precondition(lambda self: not self._is_of_topic() and self.sink.position is not None)
    @rule(then=then)
    def accept_recreated(self, then: Then) -> None:
        self._accept_recreated()
        self._go_on(then)

    def _accept_recreated(self) -> None:
        self.world.accept_recreated()
        self.sink.is_whole &= not self.sink.end
        self.sink.topic, self.sink.position, self.sink.based = self.topic_number, 0, 0
        self._start()

    @precondition(lambda self: self.is_running and self.topic and not self.is_superseded)
    @rule(what=st.sampled_from(("die between the commits", "restart", "second", "take over")), then=then)
    def disturb(self, what: str, then: Then) -> None:
        match what:
            case "die between the commits":
                self.world.lose_commit(then[1])
                self._restart()
            case "restart":
                self._restart()
            case "second":
                assert attempt(self.world.second_driver)[1] == "sink-has-driver"
            case _ if not self._unstartable():
                begin, code = self.world.usurp()
                assert code == "sink-fenced"
                self.sink.job, self.sink.has_asked, self.running = self.job, True, self.job
                self._require_begin(begin)
        self._go_on(then)

    # Jobs ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sent)
    @rule(which=st.frozensets(number, max_size=3), then=then)
    def refuse(self, which: Collection[int], then: Then) -> None:
        self.around.refused = frozenset(event.id for event in self._events(which))
        self.world.refuse(self.around.refused)
        self._go_on(then)

    @precondition(lambda self: self.has_transform and self.sent)
    @rule(leaves_out=st.frozensets(number, max_size=2), fails_for=st.frozensets(number, max_size=2), then=then)
    def change_transform(self, leaves_out: Collection[int], fails_for: Collection[int], then: Then) -> None:
        self.around.filtered = frozenset(event.id for event in self._events(leaves_out))
        self.around.failing = frozenset(event.id for event in self._events(fails_for)) - self.around.filtered
        self.world.filtered, self.world.failing = self.around.filtered, self.around.failing
        self._go_on(then)

    @rule(declared=declared, is_restarted=likely, then=then)
    def declare(self, declared: frozenset[str], is_restarted: bool, then: Then) -> None:
        """Deploy other declarations: a new version with its upcaster, a new event, a compatible edit; or take back."""
        self._deploy(self.job._replace(declared=declared), is_restarted=is_restarted)
        self._go_on(then)

    @rule(names=names_of_jobs, is_restarted=likely, then=then)
    def ask(self, names: tuple[str, ...], is_restarted: bool, then: Then) -> None:
        """Deploy a job that asks for more, less, or by other names."""
        self._deploy(self.job._replace(names=names), is_restarted=is_restarted)
        self._go_on(then)

    @rule(strategy=st.sampled_from(STRATEGIES), is_restarted=likely, is_rebuilt=st.booleans(), then=then)
    def change_strategy(self, strategy: str, is_restarted: bool, is_rebuilt: bool, then: Then) -> None:
        """Deploy another strategy; half of the time the sink is rebuilt by it at once."""
        self._deploy(self.job._replace(strategy=strategy), is_restarted=is_restarted)
        if is_rebuilt:
            self._rebuild_from_source()
        self._go_on(then)

    def _deploy(self, job: Job, *, is_restarted: bool) -> None:
        """The commands work for the new job at once, the driver when it has started again."""
        self.job = job
        self.is_exact &= job.strategy in EXACT
        self.world.deploy(job)
        if is_restarted or not self.is_running:
            self._restart()

    # Dead letters -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._letters_of_jobs())
    @rule(what=st.sampled_from(("some", "all", "a reason", "older than the horizon")), which=some, then=then)
    def replay(self, what: str, which: Collection[int], then: Then) -> None:
        names = self.sink.open()
        match what:
            case "some":
                names = self._letters(which)
                self._replay(Selection(sink=NAME, identities=names), names)
            case "a reason":
                reason = self.sink.letters[self._letters(which)[0]].reason
                names = [name for name in names if self.sink.letters[name].reason == reason]
                self._replay(Selection(sink=NAME, reason=reason), names)
            case _:
                self._replay(Selection(sink=NAME), names, is_older=what != "all")
        self._go_on(then)

    def _replay(self, selection: Selection, names: Collection[str], *, is_older: bool = False) -> None:
        self.is_exact &= not is_older  # the person has made sure that they were not applied
        found = self.world.replay(selection, is_older=is_older)
        self.sink.job, asked = self.job, self.sink.job
        counts = self.sink.replay(self.around, names, is_older=is_older)
        self.sink.job = asked
        assert found == {name: counts[name] for name in ("applied", "duplicates", "rejected", "filtered")}

    @precondition(lambda self: self.sink.open())
    @rule(which=some, then=then)
    def discard(self, which: Collection[int], then: Then) -> None:
        names = self._letters(which)
        assert self.world.discard(Selection(sink=NAME, identities=names)) == self.sink.discard(names)
        self._go_on(then)

    # Rewind -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._is_of_topic())
    @rule(to=st.one_of(st.none(), number), waits=st.booleans(), then=then)
    def rewind(self, to: int | None, waits: bool, then: Then) -> None:
        """`outbox rewind` to the positions, to the beginning or to a moment; or its question, to be answered later."""
        wanted = None if to is None else max(0, min(to, self.sink.end + 2))
        moves, code = attempt(lambda: self.world.plan(wanted))
        assert not code
        begin = self.sink.end if wanted is None else min(max(wanted, self.first), self.sink.end)
        self.planned = Planned(moves, begin)
        if not waits:
            self._answer(then)

    @precondition(lambda self: self.planned is not None)
    @rule(then=then)
    def answer_the_rewind(self, then: Then) -> None:
        self._answer(then)

    def _answer(self, then: Then) -> None:
        assert self.planned is not None
        moves, begin = self.planned
        if self.is_running and not self.is_superseded:
            assert attempt(lambda: self.world.rewind(moves))[1] == "sink-has-driver"
        self.world.stop()
        code = attempt(lambda: self.world.rewind(moves))[1]
        self.planned = None
        if self.job.strategy != self.sink.job.strategy or not self._is_of_topic():
            assert code
        elif not code:
            self.sink.decide(self.job)
        self._start(None if code else min(begin, self.sink.end))
        self._go_on(then)

    @precondition(lambda self: self._is_of_topic() and self.first > self.sink.end)
    @rule()
    def give_up(self) -> None:
        """`outbox rewind --to-positions --skip-dropped`."""
        code = attempt(self.world.give_up)[1]
        if self.job.strategy != self.sink.job.strategy:
            assert code
            return
        assert not code
        self.sink.position = self.first
        self.sink.decide(self.job)
        self._start(self.first)

    # Rebuild ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.sent)
    @rule(what=st.sampled_from(("copy", "copy", "swap", "drop")), count=st.integers(0, 8), then=then)
    def rebuild_from_topic(self, what: str, count: int, then: Then) -> None:
        """The steps of `outbox rebuild --from topic`, between those of everybody else."""
        if self.copy is None:
            self._begin_copy()
        elif what == "drop":
            self._drop_copy()
        if self.copy is not None:
            self._copy(count)
        if self.copy is not None and what == "swap":
            self._swap()
        self._go_on(then)

    def _begin_copy(self) -> None:
        found, code = attempt(self.world.begin_copy)
        if not self._is_of_topic() or not self.sink.is_whole or self.first:
            assert code in ("topic-incomplete", "topic-recreated"), code
            return
        assert (found, code) == (False, "")
        self.copy = self.sink.copy(self.job)

    def _copy(self, count: int) -> None:
        assert self.copy is not None
        if not count:
            return
        found, code = attempt(lambda: self.world.copy(count))
        if self.copy.topic != self.topic_number or self.copy.end < self.first or not self.copy.is_startable(self.job):
            assert code, "the copy cannot go on"
            self._drop_copy()
            return
        start, counts = found
        self.copy.job, self.copy.has_asked = self.job, True
        assert start <= self.copy.end
        wanted = self.copy.deliver(self.around, self.job, self.topic[start : start + count], start)
        assert counts.rows == wanted.total() - wanted["dead"] - wanted["skipped"]

    def _swap(self) -> None:
        assert self.copy is not None
        given_up = {name for name, letter in self.sink.letters.items() if letter.status == "discarded"}
        is_too_late = any(
            name not in self.copy.letters or self.copy.letters[name].status == "replayed"
            for name, letter in self.sink.letters.items()
            if name in given_up and letter.topic == self.copy.topic and letter.offset < self.copy.end
        )
        code = attempt(self.world.swap)[1]
        if self.copy.topic != self.topic_number or self.copy.end < self.first or is_too_late:
            assert code
            return
        assert not code
        for name in given_up:
            self.copy.letters[name] = self.sink.letters[name]
            if self.sink.letters[name].is_event:
                self.copy.fates[name] = "discarded"
        self.sink, self.copy = self.copy, None
        self.is_superseded = self.is_running
        if not self.is_running:
            self._start()

    def _drop_copy(self) -> None:
        assert self.world.drop_copy()
        self.copy = None

    @rule(then=then)
    def rebuild_from_source(self, then: Then) -> None:
        self._rebuild_from_source()
        self._go_on(then)

    def _rebuild_from_source(self) -> None:
        if not self._is_of_topic() or self.sink.position is None:
            return
        books = self._books()
        is_behind = self.first > self.sink.end
        self.world.rebuild_from_source(books)
        is_behind |= self.sink.decide(self.job)
        self.sink.rebuild_from_source(books, self.first)
        self.is_superseded |= is_behind and self.is_running
        if not self.is_running:
            self._start()

    # Check and retention ------------------------------------------------------------------------------------------

    @precondition(lambda self: self._is_of_topic() and self.sent)
    @rule(then=then)
    def check(self, then: Then) -> None:
        """`outbox check` agrees exactly if the model does, and names what differs."""
        self._go_on(then)
        books = self._books()
        report, codes = self.world.check(self._outbox(), books)
        drift = {key: int(number) for key, number in report.drift.items()}
        uncertain = {key for one in report.comparisons for key in one.uncertain}
        due = {key: number for key, number in self._drift(books).items() if key not in uncertain}
        unclear = set() if self.is_clean else self._unclear()
        for key in {*due, *drift} - unclear:
            assert drift.get(key, 0) == due.get(key, 0), (key, drift, due, codes)
        reasons = self._reasons(due)
        assert reasons or not codes, (codes, "though all is well")
        if self.is_clean:
            assert bool(codes) == bool(reasons), (codes, reasons)
        elif not codes:
            assert not {"open", "malformed"} & {*reasons}, reasons
            assert "drift" not in reasons or "lost" in reasons, "what the topic does not have may still come"

    def _reasons(self, due: Mapping[str, int]) -> list[str]:
        """Why check must not agree."""
        records = self.topic[self.first :]
        closed = {name for name, letter in self.sink.letters.items() if letter.status != "open"}
        known = [record.event for record in records if not record.flaw and self.job.versions(record.event.type)]
        malformed = [one for one in records if one.flaw or one.event.schema not in self.job.versions(one.event.type)]
        malformed += [one for one in records if one.event.id > self.around.latest]
        numbers: dict[tuple[str, int], set[str]] = {}
        for event in known:
            numbers.setdefault((event.key, event.version), set()).add(event.id)
        found = {
            "open": bool(self.sink.open()),
            "drift": bool(due),
            "malformed": any(one.name not in closed for one in malformed),
            "foreign": any(event not in self.source for event in known),
            "repeated": any(len(ids) > 1 for ids in numbers.values()),
            "lost": any(event not in known for event in self._outbox()),
            "gap": any((key, one) not in numbers for key, version in numbers for one in range(1, version)),
        }
        return [name for name, is_so in found.items() if is_so]

    def _drift(self, books: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """By key how much more the sink holds than is due, where that is not zero."""
        unread = {record.event.id: "in flight" for record in self.topic[self.sink.end :]}
        unread |= {
            letter.event.id: "set aside"
            for letter in self.sink.letters.values()
            if not letter.is_event and not letter.record.flaw and letter.status != "replayed"
        }
        found = {}
        for key in books.keys() | self.sink.book.keys():
            due, (total, version) = books.get(key, (0, 0))[0], self.sink.book.get(key, (0, 0))
            for event in self.source:
                fate = self.sink.fates.get(event.id) or unread.get(event.id, "applied")
                is_lacking = fate in ("set aside", "discarded", "in flight") and event.key == key
                is_made_up = self.job.strategy not in SUM and event.version <= version  # check asks the job
                is_based = event.version <= self.sink.bases.get(key, 0)
                if is_lacking and (event.type, event.schema) in self.job.wanted and not (is_made_up or is_based):
                    due -= event.quantity
            if total != due:
                found[key] = total - due
        return found

    def _unclear(self) -> set[str]:
        """The keys of which the topic does not say all: what check makes of them depends on more than the model has."""
        spoilt = {record.event.key for record in self.sent if record.flaw}
        source = {event.id for event in self.source}
        gone = {event.key for event in self.source if event.id not in self._present()}
        foreign = {record.event.key for record in self.topic if record.event.id not in source}
        partly = {event.key for event in self.source if self.sink.fates.get(event.id) in ("not asked for", "filtered")}
        partly |= {event.key for event in self.source if (event.type, event.schema) not in self.job.wanted}
        return spoilt | gone | foreign | partly

    @precondition(lambda self: self._outbox())
    @rule(count=st.integers(1, 10), then=then)
    def prune(self, count: int, then: Then) -> None:
        """The outbox forgets its first events, as far as the topic has them."""
        old = [event.id for event in self._outbox() if event.id <= self.around.latest]
        self.pruned |= {*old[:count]} & self._present()
        self._go_on(then)

    @precondition(lambda self: self.sent)
    @rule(days=st.integers(1, 20), then=then)
    def retain(self, days: int, then: Then) -> None:
        """Time passes, and retention forgets what nothing can bring again."""
        self._set_clock(max(2, self.days_ago - days))
        self.world.age()
        present = self.topic[self.first :]
        held = [*self._outbox(), *(record.event for record in present)]
        held += [one.letters[name].event for one in filter(None, (self.sink, self.copy)) for name in one.open()]
        day = min([day_of(event.id) for event in held], default=day_of(real_id(0, 1)))
        self.around.horizon = self.world.retain(min(day, day_of(real_id(0, 1))))
        for one, name in ((self.sink, NAME), (self.copy, f"{NAME}.rebuild")):
            if one is not None:
                read = self.topic[self.first : one.end] if one.topic == self.topic_number else []
                kept = self.world.state(name).letters
                one.forget(self.around.horizon, kept, {record.name for record in read})
        self._go_on(then)

    # What is compared ---------------------------------------------------------------------------------------------

    @invariant()
    def is_as_the_model_says(self) -> None:
        if not hasattr(self, "sink"):
            return
        type(self).steps += 1
        compare(self.world, self.sink, NAME, is_exact=self.is_exact)
        if self.copy is not None:
            compare(self.world, self.copy, f"{NAME}.rebuild", is_exact=self.is_exact)

    def teardown(self) -> None:
        self.world.stop()

    # Helpers ------------------------------------------------------------------------------------------------------

    def _event(self, key: str, kind: tuple[str, int], version: int, ahead_days: int = 0) -> Event:
        self.made += 1
        quantity = 1 << self.made % 50
        total = quantity + sum(event.quantity for event in self.source if event.key == key and event.version < version)
        return Event(real_id(self.made, self.days_ago - ahead_days), key, version, *kind, quantity, total)

    def _set_clock(self, days_ago: int) -> None:
        self.days_ago = days_ago
        self.around.latest = self.world.set_clock(days_ago)

    def _publish(self, record: Record) -> None:
        self.topic.append(self.world.publish(record))
        self.sent.append(self.topic[-1])

    def _send(self, one: Sent) -> None:
        if self.is_clean:
            kind = one.kind if one.kind[1] in self.job.versions(one.kind[0]) else KINDS[0]
            one = one._replace(kind=kind, what=one.what if one.what in CLEAN else "new")
        if one.what.startswith("new") or not self.sent:
            ahead_days = TOMORROW_DAYS if one.what == "new from tomorrow" else 0
            self.source.append(self._event(one.key, one.kind, self._next_version(one.key), ahead_days))
            self._publish(Record(self.source[-1]))
            return
        record = self.sent[one.which % len(self.sent)]
        event = record.event
        if one.what == "again":
            self._publish(record)
        elif one.what == "repeated version":
            self._publish(Record(self._event(event.key, (event.type, event.schema), event.version)))
        elif one.which % 3 == 2:  # a malformed copy comes before the event
            self.source.append(self._event(one.key, one.kind, self._next_version(one.key)))
            self._publish_malformed(self.source[-1], one.what)
            self._publish(Record(self.source[-1]))
        elif one.which % 3 == 1:  # with an id of its own
            own = self._event(event.key, (event.type, event.schema), event.version)
            self._publish_malformed(own, one.what)
        else:
            self._publish_malformed(event, one.what)

    def _publish_malformed(self, event: Event, flaw: str) -> None:
        self.made += 1
        self._publish(Record(event, flaw, real_uuid4(self.made) if flaw == "malformed id" else ""))

    def _next_version(self, key: str) -> int:
        return 1 + max((event.version for event in self.source if event.key == key), default=0)

    def _go_on(self, then: Then) -> None:
        for one in then[0]:
            self._send(one)
        self._deliver(then[1])

    def _deliver(self, count: int) -> None:
        if not self.is_running or self.world.next >= len(self.topic) or not count:
            return
        start = self.world.next
        if self.is_superseded:
            assert attempt(lambda: self.world.apply(count))[1] == "sink-superseded"
            self._restart()
            return
        counts = self.sink.deliver(self.around, self.running, self.topic[start : start + count], start)
        applied = self.world.apply(count)._asdict()
        assert {name: applied[name] for name in COUNTS} == {name: counts[name] for name in COUNTS}

    def _events(self, which: Collection[int]) -> list[Event]:
        return [self.sent[one % len(self.sent)].event for one in sorted(which)]

    def _letters_of_jobs(self) -> list[str]:
        return self.sink.open() if self.job.strategy == self.sink.job.strategy else []

    def _letters(self, which: Collection[int]) -> list[str]:
        found = self.sink.open()
        return sorted({found[one % len(found)] for one in which})

    def _books(self) -> dict[str, tuple[int, int]]:
        return {event.key: (event.total, event.version) for event in self.source}

    def _outbox(self) -> list[Event]:
        return [event for event in self.source if event.id not in self.pruned]

    def _present(self) -> set[str]:
        return {record.event.id for record in self.topic[self.first :] if not record.flaw}

    def _is_of_topic(self) -> bool:
        return self.sink.topic == self.topic_number

    def _restart(self) -> None:
        self.world.stop()
        self._start()

    def _start(self, expected: int | None = None) -> None:
        """Start the driver, if it starts; ``expected`` is where it must begin."""
        self.is_running = self.is_superseded = False
        begin, code = attempt(self.world.start)
        wrong = self._unstartable()
        assert code == wrong, (code, wrong)
        if code:
            return
        self.sink.job, self.sink.has_asked = self.job, True
        self.is_running, self.running = True, self.job
        if self.sink.position is None:
            self.sink.position = begin
        self._require_begin(begin)
        assert expected is None or begin == max(expected, self.first), (begin, expected)

    def _unstartable(self) -> str:
        """Why the driver must not start."""
        if not self.sink.is_startable(self.job):
            return "job-changed"
        if self.sink.position is not None and not self._is_of_topic():
            return "topic-recreated"
        return "events-lost" if self.sink.position is not None and self.first > self.sink.end else ""

    def _require_begin(self, begin: int) -> None:
        """A sink never begins beyond its position: events would be lost."""
        assert self.first <= begin <= self.sink.end, (begin, self.sink.position)


def compare(world: World, sink: Sink, name: str, *, is_exact: bool) -> None:
    """Compare what the database holds of a sink with its model. It is exact if it applies nothing that is repeated."""
    found = world.state(name)
    letters = {name: (one.status, one.is_event, one.reason) for name, one in sink.letters.items()}
    assert without_reasons(found.letters) == without_reasons(letters)
    assert found.trail == dict(sink.trail)
    assert found.book == sink.book
    assert found.skipped == sink.skipped
    assert found.position == sink.position
    assert found.applied == sink.trail.total()
    assert found.bases == sink.bases
    assert found.ids == sink.ids, "what its strategies remember"
    assert (found.versions, found.highest) == (sink.versions, sink.highest)
    statuses = {name: status for name, (status, is_event, _) in found.letters.items() if is_event}
    for event_id, fate in sink.fates.items():
        status = statuses.get(event_id, "")
        assert fate == {"open": "set aside", "discarded": "discarded"}.get(status, fate), (event_id, status)
        assert fate not in ("set aside", "discarded") or status in ("open", "discarded"), (event_id, fate)
        if is_exact:
            assert found.trail.get(event_id, 0) <= (fate == "applied"), (event_id, fate)


def without_reasons(letters: Mapping[str, tuple[str, bool, str]]) -> dict[str, tuple[Any, ...]]:
    """Of letters that are closed nobody asks for the reason."""
    return {
        name: (status, is_event, reason if status == "open" else "")
        for name, (status, is_event, reason) in letters.items()
    }


@pytest.fixture
def world(databases: Settings, tmp_path: Path) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "MAX_SHRINKING_SECONDS", SHRINKING_S)
        yield World(databases, tmp_path, patch)


@pytest.mark.timeout(0)
def test_random_operations_do_what_the_model_says(
    world: World, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, first = pytestconfig.getoption("--steps", MINUTE), pytestconfig.getoption("--seed", 0)
    Attack.world = world
    began = time.monotonic()
    chosen = settings(
        max_examples=max(1, min(ROUND, steps) // EXAMPLE),
        stateful_step_count=EXAMPLE,
        deadline=None,
        derandomize=False,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    for seed in range(first, first + -(-steps // ROUND)):
        Attack._hypothesis_internal_use_seed = seed
        try:
            run_state_machine_as_test(Attack, settings=chosen)
        finally:  # after a failure the steps of shrinking are counted too
            with capsys.disabled():
                print(f"\nseed {seed}: {Attack.steps:,} steps in {time.monotonic() - began:.0f} s", end="")  # noqa: T201
    world.close()
