"""Count what one sink has not applied, and compare its totals: pure, on what was read before.

A sink expects the events that it has asked for. Others are not in flight, lost or set aside for it.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Literal

from outbox.audit.comparison_files import Addend, Comparison
from outbox.audit.declared import Declared, EventTopic
from outbox.audit.letters import Letter
from outbox.audit.quantity import EXACT, Quantity
from outbox.audit.report import ComparisonReport, SinkReport
from outbox.audit.sinks import SinkState
from outbox.audit.source import Source, Written
from outbox.audit.topic_part import EVENT_ID_BYTES, Delivered, TopicOffset
from outbox.audit.totals import Totals

Fate = Literal["relayed", "in flight", "lost", "aged out"]


class Compared:
    """One comparison of one sink."""

    def __init__(
        self, comparison: Comparison, addends: Sequence[Addend | None], totals: Totals, source: Totals
    ) -> None:
        self._addends = addends
        self._adds = bool(comparison.adds)
        self._totals, self._source = totals, source
        self._unapplied: dict[str, Decimal] = defaultdict(Decimal)
        self._in_flight = 0
        self._excused: set[str] = set()  # keys whose difference has a known reason, and nobody knows how large it is
        self.report = ComparisonReport(comparison.name, source.totals)

    def repeat(self, event: Delivered) -> None:
        """Note what a duplicate would add."""
        addend = self._addends[event.kind]
        added = None if addend is None else addend.of(event.numbers)
        if added is not None:
            repeated = self.report.repeated
            repeated[event.key] = EXACT.add(repeated.get(event.key, Decimal(0)), added)

    def lack(
        self, key: str, kind: int | None, numbers: Sequence[Quantity | None] | None, *, is_in_flight: bool
    ) -> None:
        """Subtract an event that the source's totals contain, and the sink's do not.

        ``numbers`` are None if nobody knows them.
        """
        if not self._adds:
            self._in_flight += is_in_flight
            if not is_in_flight:
                self.excuse(key)
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
        """Do not report a difference of a key as drift: something that is reported elsewhere explains it."""
        self._excused.add(key)

    def compare(self) -> None:
        """Compare the totals of each key."""
        report = self.report
        if self._in_flight:
            report.not_compared = f"not now: {self._in_flight} in flight, and its file does not say what an event adds"
            return
        for key in self._source.totals.keys() | self._totals.totals.keys():
            if key in report.uncertain:
                continue
            due = EXACT.subtract(self._source.totals.get(key, Decimal(0)), self._unapplied.get(key, Decimal(0)))
            difference = EXACT.subtract(self._totals.totals.get(key, Decimal(0)), due)
            if difference and key in self._excused:
                report.uncertain.add(key)
            elif difference:
                report.drift[key] = difference


class Tally:
    """Counts the events that one sink has not applied, on all topics."""

    def __init__(
        self,
        state: SinkState,
        declared: Declared,
        source: Source,
        verified: Mapping[str, Mapping[str, tuple[Quantity | None, ...]]],
    ) -> None:
        """``verified``: by topic and event id in hex, the numbers of events that are not read again."""
        self.state, self._verified = state, verified
        spec = declared.sink(state.name) if state.is_declared else None
        self.wanted = declared.wanted(spec)
        self.topics = set() if spec is None else set(spec.decoders)
        self.compared = [
            Compared(one, declared.addends(spec, one), state.totals[one.id], source.totals[one.id])
            for one in declared.comparisons_of(state.name)
            if spec is not None and not state.not_compared
        ]
        self.report = SinkReport(
            state.name,
            [one.report for one in self.compared],
            discarded=state.discarded,
            duplicates=state.duplicates,
            filtered=state.filtered,
            not_compared=state.not_compared,
        )
        self.met: set[bytes] = set()  # letters whose event is on a topic or in the outbox
        self.malformed: set[bytes] = set()  # letters whose invalid record is on a topic, and is a finding there
        self._declared, self._source = declared, source

    def lack(
        self, key: str, kind: int | None, numbers: Sequence[Quantity | None] | None, *, is_in_flight: bool = False
    ) -> None:
        """See `Compared`."""
        for one in self.compared:
            one.lack(key, kind, numbers, is_in_flight=is_in_flight)

    def excuse(self, key: str) -> None:
        """See `Compared`."""
        for one in self.compared:
            one.excuse(key)

    def park(self, identity: bytes) -> None:
        """Count an event, or a record that nobody can read, that is set aside."""
        self.report.parked += 1
        text = str(uuid.UUID(bytes=identity)) if len(identity) == EVENT_ID_BYTES else f"sha256:{identity.hex()}"
        self.report.first_parked = min(self.report.first_parked or text, text)  # the oldest

    def compare(self) -> None:
        """Count the letters whose events are nowhere else, and compare the totals."""
        for identity, letter in self.state.letters.items():
            if identity not in self.met and letter.topic in self.topics:
                self._count_letter(identity, letter)
        for one in self.compared:
            one.compare()

    def _count_letter(self, identity: bytes, letter: Letter) -> None:
        """Count what the topic has dropped, and the outbox has no more; its letter is what is left.

        Nobody knows what the event in an invalid record adds, or whether the source has it.
        """
        if not letter.is_event:
            if letter.is_open and identity not in self.malformed:
                self.park(identity)
            self.excuse(letter.key)
            return
        topic = next(topic for topic in self._declared.topics if topic.name == letter.topic)
        of_topic = TopicTally(self, topic)
        if (letter.kind is not None and not self.wanted[letter.kind]) or of_topic.is_based(letter.key, letter.version):
            return
        if letter.is_open:
            self.park(identity)
        known = self._source.versions.get(letter.topic, {}).get(letter.key)
        is_foreign = known is not None and letter.version is not None and letter.version > known
        if not is_foreign and not of_topic.is_superseded(letter.key, letter.version):
            numbers = self._verified.get(letter.topic, {}).get(identity.hex(), letter.numbers)
            self.lack(letter.key, letter.kind, numbers)


class TopicTally:
    """Counts the events of one topic that one sink has not applied."""

    def __init__(self, tally: Tally, topic: EventTopic) -> None:
        state = tally.state
        self._tally, self._topic = tally, topic.name
        self._wanted, self._reads = tally.wanted, topic.name in tally.topics
        self._letters = state.letters
        self._positions = state.positions.get(topic.name, {})
        self._bases = state.bases.get(topic.name, {})
        self._versions = state.versions.get(topic.name, {})

    def is_based(self, key: str, version: int | None) -> bool:
        """Whether the event is in the state that was taken from the source."""
        return version is not None and version <= self._bases.get(key, 0)

    def is_superseded(self, key: str, version: int | None) -> bool:
        """Whether a later state makes up for the event."""
        return self._tally.state.takes_states and version is not None and version <= self._versions.get(key, 0)

    def meet(self, identity: bytes) -> None:
        """Note an invalid record of the topic."""
        letter = self._letters.get(identity)
        if letter is not None and letter.topic == self._topic:
            self._tally.malformed.add(identity)

    def repeat(self, event: Delivered) -> None:
        """Note a duplicate."""
        if self._wanted[event.kind]:
            for one in self._tally.compared:
                one.repeat(event)

    def add(
        self,
        event_id: bytes,
        event: Written | Delivered,
        place: TopicOffset | None,
        fate: Fate = "relayed",
        *,
        is_foreign: bool = False,
        is_refused: bool = False,
    ) -> None:
        """Count an event, which the topic has first at this place, unless the sink has applied it.

        The source's totals contain it unless it is foreign. If it is refused, its record breaks the contract.
        """
        if not (self._reads if event.kind is None else self._wanted[event.kind]):
            return
        has_seen = place is not None and place.offset < self._positions.get(place.partition, 0)
        letter = self._letters.get(event_id)
        if letter is None and has_seen:
            return
        if letter is not None:
            self._tally.met.add(event_id)
            if not letter.is_of(self._topic, place):
                letter = None
        if self.is_based(event.key, event.version):
            if letter is not None and letter.is_open and not letter.is_event:
                self._tally.park(event_id)  # rebuilding from the source closes letters of events only
            return
        is_in_flight = False
        if letter is None:
            if has_seen or fate == "aged out":
                return
            is_in_flight = fate != "lost"
            self._tally.report.in_flight += is_in_flight
            self._tally.report.lost += not is_in_flight
        elif letter.is_open:
            self._tally.park(event_id)
        if is_foreign or self.is_superseded(event.key, event.version):
            return
        # What is left of an invalid record that the topic has dropped is its letter.
        is_unknown = is_refused or (place is None and letter is not None and not letter.is_event)
        if is_unknown and letter is not None and not letter.is_open:
            self._tally.excuse(event.key)
        else:
            numbers = None if is_unknown else event.numbers
            self._tally.lack(event.key, event.kind, numbers, is_in_flight=is_in_flight)
