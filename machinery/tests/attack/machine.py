"""Operations of people and parts at random, on the real sink and on its model, which are compared after each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outbox.sink.repair.selection import Selection
from tests.attack import world
from tests.attack.model import Around, Counts, Event, Job, Record, Sink
from tests.attack.world import World, attempt
from tests.support.made_events import DAY_MS, NOW_MS

KEYS = ("a", "b", "c")
KINDS = (("placed", 1), ("placed", 1), ("placed", 2), ("cancelled", 1), ("paid", 1))
STRATEGIES = ("dedup", "merge", "versions", "upsert", "offsets", "naive")
FLAWS = ("not JSON", "schema violation", "key mismatch", "missing id", "malformed id")
NAMES = (("order",), ("order.placed",), ("order.placed.v1",), ("order.placed", "order.cancelled"), ("order.cancelled",))
CHANGES = ("note", "v2", "paid")
FIRST_DAY = 60  # how many days ago an example begins


class Sent(NamedTuple):
    """A record that comes: a new event of a key and kind, one of those that were sent, or a malformed one."""

    what: str
    which: int
    key: str
    kind: tuple[str, int]


WHATS = ("new", "new", "new", "again", "repeated version", *FLAWS)
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
    without: Collection[str] = ()  # names of rules that are left out
    steps = 0  # of all examples

    @initialize(
        strategy=st.sampled_from(STRATEGIES), names=names_of_jobs, is_ordered=st.booleans(), has_transform=st.booleans()
    )
    def begin(self, strategy: str, names: tuple[str, ...], is_ordered: bool, has_transform: bool) -> None:
        self.has_transform = has_transform
        self.job = Job(names, frozenset(), strategy)
        self.world.begin(self.job, is_ordered=is_ordered, has_transform=has_transform)
        self.around = Around(is_ordered=is_ordered)
        self.sink = Sink(self.job)
        self.copy: Sink | None = None
        self.source: list[Event] = []
        self.topic: list[Record] = []
        self.sent: list[Record] = []  # ever
        self.topic_number, self.first, self.made, self.days_ago = 1, 0, 0, FIRST_DAY
        self.is_running = self.is_superseded = False
        self.planned: Planned | None = None
        self._start()

    def on(self, *rules: str) -> bool:
        """Whether none of these rules is left out."""
        return not set(rules) & set(self.without)

    # The source, the topic and the driver ------------------------------------------------------------------------

    @rule(then=st.tuples(st.lists(sent, min_size=1, max_size=6), st.integers(1, 6)))
    def go_on(self, then: Then) -> None:
        self._go_on(then)

    @precondition(lambda self: self.on("restore_source") and self.source)
    @rule(which=number, then=then)
    def restore_source(self, which: int, then: Then) -> None:
        del self.source[which % len(self.source) :]
        self._go_on(then)

    @precondition(lambda self: self.on("drop_beginning") and self.topic[self.first :])
    @rule(count=st.integers(1, 6), then=then)
    def drop_beginning(self, count: int, then: Then) -> None:
        """The topic drops its first records."""
        self.world.stop()
        self.first = self.world.topic.first = min(len(self.topic), self.first + count)
        self._start()
        self._go_on(then)

    @precondition(lambda self: self.on("recreate") and self.topic)
    @rule(is_accepted=st.booleans(), then=then)
    def recreate(self, is_accepted: bool, then: Then) -> None:
        """The topic is deleted and created again, and mostly a person accepts that."""
        self.world.stop()
        self.world.recreate()
        self.topic, self.first = [], 0
        self.topic_number += 1
        self._start()
        if is_accepted:
            self.world.accept_recreated()
            self.sink.is_whole &= not self.sink.end
            self.sink.topic, self.sink.position, self.sink.based = self.topic_number, 0, 0
            self._start()
        self._go_on(then)

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
                self.sink.job = self.job
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

    @precondition(lambda self: self.on("declare"))
    @rule(declared=declared, is_restarted=likely, then=then)
    def declare(self, declared: frozenset[str], is_restarted: bool, then: Then) -> None:
        """Deploy other declarations: a new version with its upcaster, a new event, a compatible edit; or take back."""
        self._deploy(self.job._replace(declared=declared), is_restarted=is_restarted)
        self._go_on(then)

    @precondition(lambda self: self.on("ask"))
    @rule(names=names_of_jobs, is_restarted=likely, then=then)
    def ask(self, names: tuple[str, ...], is_restarted: bool, then: Then) -> None:
        """Deploy a job that asks for more, less, or by other names."""
        self._deploy(self.job._replace(names=names), is_restarted=is_restarted)
        self._go_on(then)

    @precondition(lambda self: self.on("change_strategy"))
    @rule(strategy=st.sampled_from(STRATEGIES), is_restarted=likely, then=then)
    def change_strategy(self, strategy: str, is_restarted: bool, then: Then) -> None:
        self._deploy(self.job._replace(strategy=strategy), is_restarted=is_restarted)
        self._go_on(then)

    def _deploy(self, job: Job, *, is_restarted: bool) -> None:
        """The commands work for the new job at once, the driver when it has started again."""
        self.job = job
        self.world.deploy(job)
        if is_restarted or not self.is_running:
            self._restart()

    # Dead letters -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self._letters_of_jobs())
    @rule(what=st.sampled_from(("some", "all", "a reason", "older than the horizon")), which=some, then=then)
    def replay(self, what: str, which: Collection[int], then: Then) -> None:
        names = self._open()
        match what:
            case "some":
                names = self._letters(which)
                self._replay(Selection(sink=world.NAME, identities=names), names)
            case "a reason":
                reason = self.sink.letters[self._letters(which)[0]].reason
                names = [name for name in names if self.sink.letters[name].reason == reason]
                self._replay(Selection(sink=world.NAME, reason=reason), names)
            case _:
                self._replay(Selection(sink=world.NAME), names, is_older=what != "all")
        self._go_on(then)

    def _replay(self, selection: Selection, names: Collection[str], *, is_older: bool = False) -> None:
        found = self.world.replay(selection, is_older=is_older)
        self.sink.job, asked = self.job, self.sink.job
        counts = self.sink.replay(self.around, names, is_older=is_older)
        self.sink.job = asked
        for name in ("applied", "duplicates", "rejected", "filtered"):
            assert found.get(name) == getattr(counts, name), (name, found, counts)

    @precondition(lambda self: self._open())
    @rule(which=some, then=then)
    def discard(self, which: Collection[int], then: Then) -> None:
        names = self._letters(which)
        assert self.world.discard(Selection(sink=world.NAME, identities=names)) == self.sink.discard(names)
        self._go_on(then)

    # Rewind -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.on("rewind") and self._is_of_topic())
    @rule(to=st.one_of(st.none(), number), waits=st.booleans(), then=then)
    def rewind(self, to: int | None, waits: bool, then: Then) -> None:
        """`outbox rewind` to the positions, to the beginning or to an offset; or its question, to be answered later."""
        wanted = None if to is None else max(0, min(to, self.sink.end + 2))
        moves, code = attempt(lambda: self.world.plan(wanted))
        if wanted is not None and max(wanted, self.first) > self.sink.end and wanted > self.first:
            assert code == "offset-ahead", code
            return
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

    @precondition(lambda self: self.on("drop_beginning", "rewind") and self._is_of_topic())
    @precondition(lambda self: self.first > self.sink.end)
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

    @precondition(lambda self: self.on("rebuild_from_topic") and self.sent)
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
        self.copy.job = self.job
        assert start <= self.copy.end
        assert counts.rows == sum(self.copy.deliver(self.around, self.topic[start : start + count], start)[:4])

    def _swap(self) -> None:
        assert self.copy is not None
        given_up = {name for name, letter in self.sink.letters.items() if letter.status == "discarded"}
        is_too_late = any(
            self.copy.is_dealt_with(name)
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
            self.copy.fates[name] = "discarded"
        self.sink, self.copy = self.copy, None
        self.is_superseded = self.is_running
        if not self.is_running:
            self._start()

    def _drop_copy(self) -> None:
        assert self.world.drop_copy()
        self.copy = None

    @precondition(lambda self: self.on("rebuild_from_source") and self._is_of_topic())
    @rule(then=then)
    def rebuild_from_source(self, then: Then) -> None:
        books = self._books()
        is_behind = self.first > self.sink.end
        self.world.rebuild_from_source(books)
        is_behind |= self.sink.decide(self.job)
        self.sink.rebuild_from_source(books, self.first)
        self.is_superseded |= is_behind and self.is_running
        if not self.is_running:
            self._start()
        self._go_on(then)

    # Check and retention ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.on("check") and self._is_of_topic() and self.sent)
    @rule(then=then)
    def check(self, then: Then) -> None:
        """`outbox check` agrees exactly if the model does, and names what differs."""
        self._go_on(then)
        books = self._books()
        report, codes = self.world.check(self.source, books)
        drift = {key: int(number) for key, number in report.drift.items()}
        uncertain = {key for one in report.comparisons for key in one.uncertain}
        due = self.sink.drift(self.source, books, self.topic[self.sink.end :])
        unclear = self._unclear()
        for key in {*due, *drift} - unclear - uncertain:
            assert drift.get(key, 0) == due.get(key, 0), (key, drift, due, codes)
        if any(letter.status == "open" for letter in self.sink.letters.values()):
            assert codes, "letters are open"
        if not codes:
            assert not {key for key, number in due.items() if number} - unclear, (due, unclear)

    def _unclear(self) -> set[str]:
        """The keys of which the topic does not say all: what check makes of them depends on more than the model has."""
        present = {record.event.id for record in self.topic[self.first :] if not record.flaw}
        spoilt = {record.event.key for record in self.sent if record.flaw}
        source = {event.id for event in self.source}
        gone = {event.key for event in self.source if event.id not in present}
        foreign = {record.event.key for record in self.topic if record.event.id not in source}
        partly = {event.key for event in self.source if self.sink.fates.get(event.id) in ("not asked for", "filtered")}
        partly |= {event.key for event in self.source if (event.type, event.schema) not in self.job.wanted}
        return spoilt | gone | foreign | partly

    @precondition(lambda self: self.on("retain") and self.sent)
    @rule(days=st.integers(1, 20), then=then)
    def retain(self, days: int, then: Then) -> None:
        """Time passes, and retention forgets what nothing can bring again."""
        self.days_ago = max(2, self.days_ago - days)
        self.world.age()
        present = self.topic[self.first :]
        held = [*self.source, *(record.event for record in present)]
        held += [letter.record.event for one in filter(None, (self.sink, self.copy)) for letter in one.open_letters()]
        day = min([day_of(event.id) for event in held], default=day_of(real_id(0, 1)))
        self.around.horizon = self.world.retain(min(day, day_of(real_id(0, 1))))
        names = {record.name for record in present}
        for one, name in ((self.sink, world.NAME), (self.copy, f"{world.NAME}.rebuild")):
            if one is not None:
                one.forget(self.around.horizon, self.world.state(name).letters, names)
        self._go_on(then)

    # What is compared ---------------------------------------------------------------------------------------------

    @invariant()
    def is_as_the_model_says(self) -> None:
        if not hasattr(self, "sink"):
            return
        type(self).steps += 1
        compare(self.world, self.sink, world.NAME)
        if self.copy is not None:
            compare(self.world, self.copy, f"{world.NAME}.rebuild")

    def teardown(self) -> None:
        self.world.stop()

    # Helpers ------------------------------------------------------------------------------------------------------

    def _event(self, key: str, kind: tuple[str, int], version: int) -> Event:
        self.made += 1
        quantity = 1 << self.made % 50
        total = quantity + sum(event.quantity for event in self.source if event.key == key and event.version < version)
        return Event(real_id(self.made, self.days_ago), key, version, *kind, quantity, total)

    def _publish(self, record: Record) -> None:
        self.topic.append(self.world.publish(record))
        self.sent.append(self.topic[-1])

    def _send(self, one: Sent) -> None:
        if one.what == "new" or not self.sent:
            version = 1 + max((event.version for event in self.source if event.key == one.key), default=0)
            self.source.append(self._event(one.key, one.kind, version))
            self._publish(Record(self.source[-1]))
            return
        record = self.sent[one.which % len(self.sent)]
        event = record.event
        if one.what == "again":
            self._publish(record)
        elif one.what == "repeated version":
            self._publish(Record(self._event(event.key, (event.type, event.schema), event.version)))
        else:
            if one.which % 2:  # with an id of its own, and not that of the real event
                event = self._event(event.key, (event.type, event.schema), event.version)
            self.made += 1
            self._publish(Record(event, one.what, real_uuid4(self.made) if one.what == "malformed id" else ""))

    def _go_on(self, then: Then) -> None:
        """Let records come, and deliver some."""
        for one in then[0]:
            self._send(one)
        self._deliver(then[1])

    def _deliver(self, count: int) -> None:
        if not self.is_running or self.world.next >= len(self.topic) or not count:
            return
        start = self.world.next
        if self.is_superseded:
            assert attempt(lambda: self.world.apply(count))[1] in ("sink-superseded", "sink-fenced")
            self._restart()
            return
        counts = self.sink.deliver(self.around, self.topic[start : start + count], start)
        applied = self.world.apply(count)
        found = Counts(*(getattr(applied, name) for name in Counts._fields))
        assert found == counts, (found, counts)

    def _events(self, which: Collection[int]) -> list[Event]:
        return [self.sent[one % len(self.sent)].event for one in sorted(which)]

    def _open(self) -> list[str]:
        return [name for name, letter in self.sink.letters.items() if letter.status == "open"]

    def _letters_of_jobs(self) -> list[str]:
        return self._open() if self.job.strategy == self.sink.job.strategy else []

    def _letters(self, which: Collection[int]) -> list[str]:
        found = self._open()
        return sorted({found[one % len(found)] for one in which})

    def _books(self) -> dict[str, tuple[int, int]]:
        """The source's totals and versions by key."""
        return {event.key: (event.total, event.version) for event in self.source}

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
        if code != "job-changed":
            self.sink.job = self.job  # also if it does not start for another reason: no topic has had what is new
        if code:
            return
        self.is_running = True
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
        """It never begins beyond its position: events would be lost."""
        assert self.first <= begin <= self.sink.end, (begin, self.sink.position)


def compare(world: World, sink: Sink, name: str) -> None:
    """Compare what the database holds of a sink with its model."""
    found = world.state(name)
    letters = {name: (one.status, one.is_event, one.reason) for name, one in sink.letters.items()}
    assert without_reasons(found.letters) == without_reasons(letters)
    assert found.trail == dict(sink.trail)
    assert found.book == sink.book
    assert found.skipped == sink.skipped
    assert found.position == sink.position
    assert found.applied == sink.applied
    assert found.bases == sink.bases


def without_reasons(letters: Mapping[str, tuple[str, bool, str]]) -> dict[str, tuple[Any, ...]]:
    """Of letters that are closed nobody asks for the reason."""
    return {
        name: (status, is_event, reason if status == "open" else "")
        for name, (status, is_event, reason) in letters.items()
    }


def real_id(number: int, days_ago: int = 0) -> str:
    """A UUIDv7 that no other number has."""
    return uuid_text((NOW_MS - days_ago * DAY_MS + number) << 80 | 7 << 76 | 2 << 62 | number)


def day_of(event_id: str) -> date:
    """The day (UTC) of a UUIDv7."""
    return datetime.fromtimestamp(int(event_id.replace("-", "")[:12], 16) / 1000, UTC).date()


def real_uuid4(number: int) -> str:
    """A UUID that is no UUIDv7."""
    return uuid_text(4 << 76 | 2 << 62 | number)


def uuid_text(value: int) -> str:
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
