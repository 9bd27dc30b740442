"""Count the events that one sink has not applied, and compare its totals.

A sink expects the events that it has asked for. Others are not in flight, lost or set aside for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import partial
from typing import Literal, NamedTuple

from outbox.audit.declared import EXACT, Addend, Declared, name_in
from outbox.audit.report import ComparisonReport, SinkReport
from outbox.audit.rows import ComparedRows, difference_of
from outbox.audit.sinks import Letter, Sinks, SinkState, TopicOffset
from outbox.audit.source import Source
from outbox.audit.store import Store
from outbox.base.errors import plural
from outbox.sink.rows import Difference

Fate = Literal["relayed", "in flight", "lost", "aged out"]


class Event(NamedTuple):
    """An event of a topic or of the outbox, with its first place on the topic, if it has one.

    ``texts`` and ``payload`` say its numbers: see `Written`.
    """

    topic: int
    event_id: str
    kind: int | None
    key: str
    version: int | None
    texts: Sequence[str | None]
    payload: str | None = None
    partition: int | None = None
    offset: int = 0

    @property
    def place(self) -> TopicOffset | None:
        """Where it is."""
        return None if self.partition is None else TopicOffset(self.partition, self.offset)


class ComparedSink:
    """One comparison of one sink. Events that the sink has not applied explain a difference of their keys: of totals by
    what they add, if the comparison says that, and otherwise by whatever they change.
    """

    def __init__(
        self, rows: ComparedRows, addends: Sequence[Addend | None], topics: Sequence[int], *, hides_values: bool
    ) -> None:
        self._rows, self._topics, self._hides_values = rows, topics, hides_values
        self._addends = addends if rows.comparison.adds else None  # by kind; None if nobody knows
        self._unapplied: dict[str, Decimal] = defaultdict(Decimal)
        self._in_flight: set[str] = set()  # keys of events that the source's side contains, and the sink's does not
        self._excused: set[str] = set()  # keys whose difference has a known reason, and nobody knows how large it is
        self.report = ComparisonReport.of(rows)

    def repeat(self, key: str, kind: int, numbers: Sequence[Decimal | None]) -> None:
        """Note what a duplicate would add."""
        addend = None if self._addends is None else self._addends[kind]
        added = None if addend is None else addend.of(numbers)
        if added is not None:
            repeated = self.report.repeated
            repeated[key] = EXACT.add(repeated.get(key, Decimal(0)), added)

    def lack(self, key: str, kind: int | None, numbers: Sequence[Decimal | None] | None, *, is_in_flight: bool) -> None:
        """Note an event that the source's side contains, and the sink's does not.

        ``numbers`` are None if nobody knows them.
        """
        if self._addends is None:
            (self._in_flight if is_in_flight else self._excused).add(key)
            return
        addend = Addend(1, is_known=False) if kind is None else self._addends[kind]
        if addend is None:
            return
        added = None if kind is None or numbers is None else addend.of(numbers)
        if added is None:
            self.report.uncertain.add(key)
        else:
            self._unapplied[key] = EXACT.add(self._unapplied[key], added)

    def excuse(self, key: str) -> None:
        """Do not report a difference of a key: something that is reported elsewhere explains it."""
        self._excused.add(key)

    def compare(self, is_erased: Callable[[str], bool]) -> None:
        """Compare each key, after all events. The totals or row of an erased one may differ."""
        if self._rows.comparison.columns:
            self._compare_rows(is_erased)
        elif self._in_flight:
            keys = plural(len(self._in_flight), "key")
            self.report.not_compared = f"not now: events of {keys} in flight, and its file does not say what one adds"
        else:
            self._compare_totals(is_erased)

    def _compare_rows(self, is_erased: Callable[[str], bool]) -> None:
        """If other keys than those of events have rows, an event may change any row."""
        unapplied = len(self._in_flight | self._excused)
        other = self._rows.other_key(self._topics) if unapplied and self._topics else None
        if other is not None:
            self.report.not_compared = (
                f"not now: events of {plural(unapplied, 'key')} are not applied, and {other} is no key of events"
            )
            return
        self.report.uncertain |= self._in_flight
        for key, _, _, source, sink in self._rows.differing():
            if source == sink or key in self._in_flight:
                continue
            if key in self._excused or is_erased(key):
                self.report.uncertain.add(key)
            else:
                difference = Difference.of(key, source, sink)
                self.report.differences.add(difference.without_values if self._hides_values else difference)

    def _compare_totals(self, is_erased: Callable[[str], bool]) -> None:
        report = self.report
        differing = {key: (source, sink) for key, _, _, source, sink in self._rows.differing() if source != sink}
        for key in {**differing, **self._unapplied}.keys() - report.uncertain:
            source, sink = differing.get(key, (None, None))
            difference = EXACT.add(difference_of(source, sink), self._unapplied.get(key, Decimal(0)))
            if difference and (key in self._excused or is_erased(key)):
                report.uncertain.add(key)
            elif difference:
                report.drift[key] = difference


class Tally:
    """Counts the events that one sink has not applied, on all topics."""

    def __init__(self, state: SinkState, declared: Declared, source: Source, store: Store) -> None:
        self.state = state
        spec = declared.sink(state.name) if state.is_declared else None
        self.topics = set() if spec is None else set(spec.decoders)
        known = all(topic in source.versions for topic in self.topics)
        topics = [declared.topic_by_name[topic].number for topic in self.topics] if known else []
        self.compared = [
            ComparedSink(
                ComparedRows(store, one, state.name),
                declared.addends(spec, one),
                topics,
                hides_values=spec.is_personal,
            )
            for one in declared.comparisons_of(state.name)
            if spec is not None and not state.not_compared
        ]
        self.report = SinkReport.of(state, [one.report for one in self.compared])
        self._names = [topic.name for topic in declared.topics]
        self._wanted = [spec is not None and name_in(spec, kind) is not None for kind in declared.kinds]  # by kind
        self._numbers, self._source = declared.numbers, source
        self._met: set[str] = set()  # letters whose event is on a topic or in the outbox
        self._malformed: set[str] = set()  # letters whose invalid record is on a topic, and is a finding there

    def meet(self, topic: str, identity: str) -> None:
        """Note an invalid record of a topic."""
        letter = self.state.letters.get(identity)
        if letter is not None and letter.topic == topic:
            self._malformed.add(identity)

    def repeat(self, key: str, kind: int, texts: Sequence[str | None]) -> None:
        """Note a duplicate."""
        if self._wanted[kind]:
            for one in self.compared:
                one.repeat(key, kind, self._numbers[kind].of(texts))

    def add(self, event: Event, fate: Fate = "relayed", *, is_foreign: bool = False, is_refused: bool = False) -> None:
        """Count an event, unless the sink has applied it.

        The source's totals contain it unless it is foreign. If it is refused, its record breaks the contract.
        """
        topic, place = self._names[event.topic], event.place
        if not (topic in self.topics if event.kind is None else self._wanted[event.kind]):
            return
        positions = self.state.positions.get(topic, {})
        has_seen = place is not None and place.offset < positions.get(place.partition, 0)
        letter = self.state.letters.get(event.event_id)
        if letter is None and has_seen:
            return
        if letter is not None:
            self._met.add(event.event_id)
            if not letter.is_of(topic, place):
                letter = None
        if self._is_based(topic, event.key, event.version):
            if letter is not None and letter.is_open and not letter.is_event:
                self._park(event.event_id)  # rebuilding from the source closes letters of events only
            return
        is_in_flight = False
        if letter is None:
            if has_seen or fate == "aged out":
                return
            is_in_flight = fate != "lost"
            self.report.in_flight += is_in_flight
            self.report.lost += not is_in_flight
        elif letter.is_open:
            self._park(event.event_id)
        is_ahead = is_in_flight and self._is_ahead(topic, event)
        if is_foreign or is_ahead or self._is_superseded(topic, event.key, event.version):
            return
        # What is left of an invalid record that the topic has dropped is its letter.
        is_unknown = is_refused or is_ahead is None or (place is None and letter is not None and not letter.is_event)
        if is_unknown and letter is not None and not letter.is_open:
            self._excuse(event.key)
            return
        numbers = None if is_unknown or event.kind is None else self._numbers[event.kind].of(event.texts, event.payload)
        self._lack(event.key, event.kind, numbers, is_in_flight=is_in_flight)

    def compare(self, sinks: Sinks) -> None:
        """Count the dead letters whose events are neither on a topic nor in the outbox, and compare the totals."""
        for identity, letter in self.state.letters.items():
            if identity not in self._met and letter.topic in self.topics:
                self._count_letter(identity, letter)
        for one in self.compared:
            one.compare(partial(sinks.is_erased, self.topics))

    def _count_letter(self, identity: str, letter: Letter) -> None:
        """Count what the topic has dropped, and the outbox has no more; its letter is what is left.

        Nobody knows what the event in an invalid record adds, or whether the source has it.
        """
        topic, key, version = letter.topic, letter.key, letter.version
        if not letter.is_event:
            if letter.is_open and identity not in self._malformed:
                self._park(identity)
            self._excuse(key)
            return
        if (letter.kind is not None and not self._wanted[letter.kind]) or self._is_based(topic, key, version):
            return
        if letter.is_open:
            self._park(identity)
        known = self._source.versions.get(topic, {}).get(key)
        is_foreign = known is not None and version is not None and version > known
        if not is_foreign and not self._is_superseded(topic, key, version):
            self._lack(key, letter.kind, letter.numbers)

    def _is_based(self, topic: str, key: str, version: int | None) -> bool:
        """Whether an event is in the state that was taken from the source."""
        return version is not None and version <= self.state.bases.get(topic, {}).get(key, 0)

    def _is_superseded(self, topic: str, key: str, version: int | None) -> bool:
        """Whether a later state makes up for an event."""
        applied = self.state.versions.get(topic, {}).get(key, 0)
        return self.state.takes_states and version is not None and version <= applied

    def _is_ahead(self, topic: str, event: Event) -> bool | None:
        """Whether the result has an event that the sink's positions have not passed; None if nobody knows."""
        if not self.state.may_be_ahead:
            return False
        versions = self.state.versions.get(topic)
        return None if event.version is None or not versions else event.version <= versions.get(event.key, 0)

    def _lack(
        self, key: str, kind: int | None, numbers: Sequence[Decimal | None] | None, *, is_in_flight: bool = False
    ) -> None:
        for one in self.compared:
            one.lack(key, kind, numbers, is_in_flight=is_in_flight)

    def _excuse(self, key: str) -> None:
        for one in self.compared:
            one.excuse(key)

    def _park(self, identity: str) -> None:
        """Count an event, or a record that nobody can read, that is set aside."""
        self.report.parked += 1
        self.report.first_parked = min(self.report.first_parked or identity, identity)  # the oldest
