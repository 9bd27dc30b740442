"""A pure model of one sink: what each operation makes of its events, as docs/architecture.md draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

PARKED, OLDER, NOT_ASKED = "parked", "older than the deduplication horizon", "not asked for"
SUM = ("dedup", "merge", "versions", "offsets", "naive")  # strategies whose result adds up events
Change = frozenset[str]  # what is declared beside the first version: "note", "v2", "paid"


class Event(NamedTuple):
    """An event of the source, the n-th of all."""

    id: str
    key: str
    version: int
    type: str
    schema: int
    quantity: int
    total: int  # of its key, after it


class Record(NamedTuple):
    """A record of the topic: an event, or a record that the decoder refuses for the reason ``flaw``."""

    event: Event
    flaw: str = ""
    identity: str = ""

    @property
    def name(self) -> str:
        """The identity of its letter."""
        return self.identity or self.event.id


class Job(NamedTuple):
    """What is deployed."""

    names: tuple[str, ...]
    declared: Change
    strategy: str

    def versions(self, type_: str) -> list[int]:
        """The declared versions of an event type."""
        found = {"placed": [1, 2] if "v2" in self.declared else [1], "cancelled": [1]}
        return (found | ({"paid": [1]} if "paid" in self.declared else {})).get(type_, [])

    @property
    def asked(self) -> frozenset[tuple[str, int]]:
        """The names by which it asks for events, with their versions."""
        return frozenset(
            (f"order.{type_}" + (f".v{version}" if f"order.{type_}.v{version}" in self.names else ""), version)
            for type_, version in self.wanted
        )

    @property
    def wanted(self) -> frozenset[tuple[str, int]]:
        """The versions of events that it takes."""
        return frozenset(
            (type_, version)
            for type_ in ("placed", "cancelled", "paid")
            for version in self.versions(type_)
            for name in self.names
            if name in ("order", f"order.{type_}", f"order.{type_}.v{version}")
        )

    def judge(self, record: Record) -> str:
        """Why the record is no event; empty if it is one; what it is skipped as, behind "skip ", if it is not taken."""
        type_, schema = record.event.type, record.event.schema
        known, taken = self.versions(type_), self.wanted
        if (type_, schema) not in taken and record.flaw != "no type":
            every = "order" in self.names or f"order.{type_}" in self.names
            if not known and "order" not in self.names:
                return f"skip *.{type_}"
            if known and not every:
                none = all(type_ != one for one, _ in taken)
                return f"skip order.{type_}" if none else f"skip order.{type_}.v{schema}"
        if record.flaw == "not JSON" or record.flaw in ("missing id", "malformed id"):
            return record.flaw
        if (type_, schema) not in taken:
            return "unknown schema version" if known else "unknown event type"
        return record.flaw

    @property
    def wanted_names(self) -> set[str]:
        """The names that an event which it does not take must not have."""
        return {
            name
            for type_, schema in self.wanted
            for name in (f"order.{type_}", f"order.{type_}.v{schema}", f"*.{type_}")
        }


class Row(NamedTuple):
    """An event at a place."""

    event: Event
    offset: int
    topic: int


@dataclass
class Letter:
    """A dead letter. ``topic`` and ``offset`` are where its record was first."""

    record: Record
    reason: str
    topic: int
    offset: int
    is_event: bool = False
    status: str = "open"


class Counts(NamedTuple):
    """What became of a batch or a replay."""

    applied: int = 0
    duplicates: int = 0
    rejected: int = 0
    filtered: int = 0
    dead: int = 0
    skipped: int = 0


@dataclass
class Around:
    """What is around the sink: what the projection refuses, and what the transform leaves out or fails for."""

    refused: frozenset[str] = frozenset()
    filtered: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    horizon: str = ""
    is_ordered: bool = False


@dataclass
class Sink:
    """A sink. ``fates``: the state of each event that it was given; ``trail``: how often each was applied."""

    job: Job
    topic: int = 1
    position: int | None = None
    based: int = 0  # what lies below was part of the source's state, or the source has forgotten it
    is_whole: bool = True  # the topic that it reads has had every event that it ever read
    ids: set[str] = field(default_factory=set)
    versions: set[tuple[str, int]] = field(default_factory=set)
    highest: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    letters: dict[str, Letter] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    fates: dict[str, str] = field(default_factory=dict)
    trail: Counter[str] = field(default_factory=Counter)
    book: dict[str, tuple[int, int]] = field(default_factory=dict)
    applied: int = 0

    @property
    def end(self) -> int:
        """Its position."""
        return self.position or 0

    def deliver(self, around: Around, records: Sequence[Record], start: int) -> Counts:
        """A batch of the topic from an offset on."""
        rows, dead, skipped = list[Row](), 0, 0
        for offset, record in enumerate(records, start):
            found = self.job.judge(record)
            if found.startswith("skip "):
                skipped += 1
                self.skipped.add(found.removeprefix("skip "))
                self.fates.setdefault(record.event.id, NOT_ASKED)
            elif found:
                dead += 1
                self.letters.setdefault(record.name, Letter(record, found, self.topic, offset))
            else:
                rows.append(Row(record.event, offset, self.topic))
        left = [row for row in rows if not self._is_resolved(row)]
        counts = self._apply(around, left, is_replay=False)
        self.position = max(self.end, start + len(records))
        duplicates = len(rows) - counts.applied - counts.rejected - counts.filtered
        return counts._replace(duplicates=duplicates, dead=dead, skipped=skipped)

    def _is_resolved(self, row: Row) -> bool:
        letter = self.letters.get(row.event.id)
        if letter is None or (letter.status == "open" and not letter.is_event):
            return False
        # What was discarded is one record that was no event; another one, of the event itself, is delivered.
        is_same = letter.is_event or (letter.topic, letter.offset) == (row.topic, row.offset)
        is_same |= letter.record == Record(row.event)
        return letter.status != "discarded" or is_same

    def replay(self, around: Around, names: Collection[str], *, is_older: bool = False) -> Counts:
        """Replay open letters and those that are parked behind them: of each topic in one batch."""
        keys = {self.letters[name].record.event.key for name in self.open(names)}
        chosen = self.open(names) | {
            name
            for name in self.open(self.letters)
            if self.letters[name].reason == PARKED and self.letters[name].record.event.key in keys
        }
        total = Counts()
        for topic in sorted({self.letters[name].topic for name in chosen}):
            of_topic = {name for name in chosen if self.letters[name].topic == topic}
            total = Counts(*map(sum, zip(total, self._replay(around, of_topic, is_older=is_older), strict=True)))
        return total

    def open(self, names: Iterable[str]) -> set[str]:
        """Those of the letters that are open."""
        return {name for name in names if name in self.letters and self.letters[name].status == "open"}

    def _replay(self, around: Around, names: Collection[str], *, is_older: bool) -> Counts:
        rows, rejected = list[Row](), 0
        for name in sorted(names, key=lambda name: self.letters[name].offset):
            letter = self.letters[name]
            if is_older and letter.reason != OLDER:
                continue
            found = self.job.judge(letter.record)
            if found:
                if letter.reason != OLDER:
                    letter.reason = NOT_ASKED if found.startswith("skip ") else found
                rejected += 1
            else:
                rows.append(Row(letter.record.event, letter.offset, letter.topic))
        counts = self._apply(around, rows, is_replay=True, is_older=is_older)
        duplicates = len(rows) - counts.applied - counts.rejected - counts.filtered
        return counts._replace(duplicates=duplicates, rejected=counts.rejected + rejected)

    def _apply(self, around: Around, rows: Sequence[Row], *, is_replay: bool, is_older: bool = False) -> Counts:
        based = {row for row in rows if self._is_based(row)}
        for row in based:
            self._close(row.event.id)
            self.fates[row.event.id] = "applied"
        rows = [row for row in rows if row not in based]
        of_batch = {row.event.id for row in rows}
        rejected: dict[str, str] = {}
        new = self._select(around, rows, rejected)
        for row in rows:
            letter = self.letters.get(row.event.id)
            if letter is None or letter.status != "open" or any(row.event.id == one.event.id for one in new):
                continue
            if is_replay:
                is_admitted = is_older or self.job.strategy == "offsets" or (letter.is_event and letter.reason != OLDER)
            else:
                at_place = (letter.topic, letter.offset) == (self.topic, row.offset)
                is_admitted = self.job.strategy == "offsets" and at_place
            if is_admitted:
                new.append(row)
                rejected.pop(row.event.id, None)
        filtered = [row for row in new if row.event.id in around.filtered]
        new = [row for row in new if row.event.id not in around.filtered]
        rejected |= {row.event.id: "transform failed" for row in new if row.event.id in around.failing}
        waiting = [row for row in new if row.event.id not in around.failing]
        rejected |= {row.event.id: "unwelcome" for row in waiting if row.event.id in around.refused}
        if around.is_ordered:
            self._park(rows, waiting, of_batch, rejected)
        new = [row for row in waiting if row.event.id not in rejected]
        for row in rows:
            if row.event.id in rejected:
                self._set_aside(row, rejected[row.event.id])
        self._add(new)
        for row in rows:
            if row.event.id not in rejected:
                self._close(row.event.id)
                if row in filtered or row in new:
                    self.fates[row.event.id] = "filtered" if row in filtered else "applied"
                self.fates.setdefault(row.event.id, "applied")
        return Counts(len(new), 0, len(rejected), len(filtered))

    def _set_aside(self, row: Row, reason: str) -> None:
        """A letter of the event that there is stays, with another reason; one of a record that is no event goes."""
        known = self.letters.get(row.event.id)
        if known is None or not known.is_event or known.status != "open":
            self.letters[row.event.id] = Letter(Record(row.event), reason, row.topic, row.offset, is_event=True)
        elif known.reason != OLDER:
            known.reason = reason
        self.fates[row.event.id] = "set aside"

    def _is_based(self, row: Row) -> bool:
        base = self.bases.get(row.event.key)
        has_passed = row.topic == self.topic and row.offset < self.based
        return base is not None and (has_passed or row.event.version <= base)

    def _select(self, around: Around, rows: Sequence[Row], rejected: dict[str, str]) -> list[Row]:
        """What the strategy does not know; it knows it from now on."""
        match self.job.strategy:
            case "naive":
                return list(rows)
            case "offsets":
                return [row for row in rows if row.offset >= self.end]
            case "upsert":
                newer = [row for row in rows if row.event.version > self.highest.get(row.event.key, 0)]
                return list({(row.event.key, row.event.version): row for row in reversed(newer)}.values())
            case "versions":
                firsts: dict[tuple[str, int], Row] = {}
                for row in rows:
                    number = (row.event.key, row.event.version)
                    if number not in self.versions and firsts.setdefault(number, row).event.id != row.event.id:
                        rejected[row.event.id] = "repeated version"
                self.versions |= firsts.keys()
                return list(firsts.values())
        known = self.ids if self.job.strategy == "merge" else set()
        rejected |= {row.event.id: OLDER for row in rows if row.event.id < around.horizon and row.event.id not in known}
        new = {row.event.id: row for row in reversed(rows) if row.event.id not in self.ids | rejected.keys()}
        self.ids |= new.keys()
        return [row for row in new.values() if row.event.id >= around.horizon]

    def _park(self, rows: Sequence[Row], new: Sequence[Row], of_batch: set[str], rejected: dict[str, str]) -> None:
        letters = [letter for name, letter in self.letters.items() if letter.status == "open" and name not in of_batch]
        for row in new:
            mine = [one for one in letters if one.record.event.key == row.event.key and not one.is_event]
            if any(one.topic != row.topic or one.offset < row.offset for one in mine):
                rejected[row.event.id] = PARKED
        lowest: dict[str, int] = {}
        earlier = [row.event for row in rows if row.event.id in rejected]
        for event in [*earlier, *(one.record.event for one in letters if one.is_event)]:
            lowest[event.key] = min(event.version, lowest.get(event.key, event.version))
        for row in new:
            if row.event.version > lowest.get(row.event.key, row.event.version):
                rejected[row.event.id] = PARKED

    def _add(self, new: Sequence[Row]) -> None:
        self.applied += len(new)
        self.trail.update(row.event.id for row in new)
        for event in sorted((row.event for row in new), key=lambda event: event.version):
            total, version = self.book.get(event.key, (0, 0))
            if self.job.strategy in SUM:
                self.book[event.key] = (total + event.quantity, max(version, event.version))
            elif event.version > version:
                self.book[event.key] = (event.total, event.version)
            if self.job.strategy == "upsert":
                self.highest[event.key] = max(event.version, self.highest.get(event.key, 0))

    def _close(self, name: str) -> None:
        if name in self.letters and self.letters[name].status == "open":
            self.letters[name].status = "replayed"

    def discard(self, names: Collection[str]) -> int:
        """Give letters up, for good."""
        chosen = self.open(names)
        for name in chosen:
            self.letters[name].status = "discarded"
            self.fates[name] = "discarded"
        return len(chosen)

    def is_dealt_with(self, name: str) -> bool:
        """Whether it is too late to give up the record of a letter."""
        letter = self.letters.get(name)
        return letter is None or letter.status == "replayed"

    def is_startable(self, job: Job) -> bool:
        """Whether the job asks for what the sink was asked for, or for more that no topic has had yet."""
        if self.position is None or (job.strategy, job.asked) == (self.job.strategy, self.job.asked):
            return True
        is_more = job.strategy == self.job.strategy and job.asked >= self.job.asked
        return is_more and not job.wanted_names & self.skipped

    def decide(self, job: Job) -> bool:
        """A person has decided that it asks for this from now on; whether that is something else."""
        is_changed = (job.strategy, job.asked) != (self.job.strategy, self.job.asked)
        self.job = job
        self.skipped -= job.wanted_names
        return is_changed

    def copy(self, job: Job) -> Sink:
        """The copy of a rebuild from the topic by a job: it has nothing yet but what was discarded."""
        discarded = {name: replace(one) for name, one in self.letters.items() if one.status == "discarded"}
        return Sink(job, self.topic, 0, letters=discarded)

    def rebuild_from_source(self, source: Mapping[str, tuple[int, int]], first: int) -> None:
        """Take the source's totals and versions by key. What the sink has passed by now is part of that, or of a time
        that the source has forgotten.
        """
        known = {key for key, _ in self.versions} if self.job.strategy == "versions" else set[str]()
        known |= self.highest.keys() if self.job.strategy == "upsert" else set()
        for key in source.keys() | self.bases.keys() | known:
            self.bases[key] = source[key][1] if key in source else 0
            if self.job.strategy == "upsert" and key in self.highest:
                self.highest[key] = min(self.bases[key], self.highest[key])
        self.book = {key: (0, version) for key, (_, version) in self.book.items()} | dict(source)
        if self.job.strategy == "versions":
            self.versions = {one for one in self.versions if one[1] <= self.bases.get(one[0], one[1])}
        self.position = self.based = max(self.end, first)
        for name, letter in self.letters.items():
            if letter.is_event and letter.record.event.key in self.bases and letter.status == "open":
                self._close(name)
                self.fates[name] = "applied"

    def open_letters(self) -> list[Letter]:
        """What is set aside."""
        return [letter for letter in self.letters.values() if letter.status == "open"]

    def forget(self, horizon: str, kept: Collection[str], on_topic: Collection[str]) -> None:
        """Retention: letters that are not ``kept`` must be of no use, and ids below the horizon are unknown."""
        self.ids = {one for one in self.ids if one >= horizon}
        for name in self.letters.keys() - set(kept):
            letter = self.letters.pop(name)
            assert letter.status != "open", f"{name} is open"
            assert not (letter.status == "discarded" and letter.is_event), f"{name} says what is not due"
            assert name not in on_topic, f"{name} is on the topic"

    def drift(
        self, source: Sequence[Event], books: Mapping[str, tuple[int, int]], in_flight: Sequence[Record]
    ) -> dict[str, int]:
        """By key how much more the sink holds than is due, where that is not zero."""
        waiting = {record.event.id for record in in_flight}
        found = {}
        for key in books.keys() | self.book.keys():
            due, (total, version) = books.get(key, (0, 0))[0], self.book.get(key, (0, 0))
            for event in source:
                is_made_up = self.job.strategy not in SUM and event.version <= version
                is_excused = self.fates.get(event.id) in ("set aside", "discarded")
                is_excused |= event.id in waiting and event.id not in self.fates
                if event.key == key and is_excused and not is_made_up and event.version > self.bases.get(key, 0):
                    due -= event.quantity
            if total != due:
                found[key] = total - due
        return found
