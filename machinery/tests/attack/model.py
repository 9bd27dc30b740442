"""A pure model of one sink: what each operation makes of its events, as docs/architecture.md draws it. In front of it
the events, records and jobs of the random operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import NamedTuple
from uuid import UUID

from tests.support.made_events import DAY_MS, NOW_MS

PARKED, OLDER, NOT_ASKED = "parked", "older than the deduplication horizon", "not asked for"
SUM = ("dedup", "merge", "versions", "offsets", "naive")  # strategies whose result adds up events


class Event(NamedTuple):
    """An event of the source. ``total`` is that of its key, after it."""

    id: str
    key: str
    version: int
    type: str
    schema: int
    quantity: int
    total: int


class Record(NamedTuple):
    """A record of the topic: an event, or a record that the decoder refuses for the reason ``flaw``."""

    event: Event
    flaw: str = ""
    identity: str = ""

    @property
    def name(self) -> str:
        return self.identity or self.event.id


class Job(NamedTuple):
    """A job and its declarations. ``declared`` says which of these are added: the property "note", the version "v2",
    the event "paid".
    """

    names: tuple[str, ...]
    declared: frozenset[str]
    strategy: str

    def versions(self, type_: str) -> list[int]:
        if type_ == "paid":
            return [1] if "paid" in self.declared else []
        return [1, 2] if type_ == "placed" and "v2" in self.declared else [1]

    @property
    def wanted(self) -> dict[tuple[str, int], str]:
        """The versions of events that it takes, with the name by which it asks for each."""
        return {
            (type_, version): f"order.{type_}" + (f".v{version}" if f"order.{type_}.v{version}" in self.names else "")
            for type_ in ("placed", "cancelled", "paid")
            for version in self.versions(type_)
            if {"order", f"order.{type_}", f"order.{type_}.v{version}"} & {*self.names}
        }

    @property
    def asked(self) -> frozenset[tuple[str, int]]:
        """The names by which it asks for events, with their versions."""
        return frozenset((name, version) for (_, version), name in self.wanted.items())

    @property
    def wanted_names(self) -> set[str]:
        """The names that an event which it passes must not have."""
        names = (f"order.{type_},order.{type_}.v{schema},*.{type_}" for type_, schema in self.wanted)
        return {name for three in names for name in three.split(",")}

    def judge(self, record: Record, latest: str) -> str:
        """Why the record is no event; empty if it is one; what it is passed as, behind "skip ", if it is not taken.

        An event with an id greater than ``latest`` is from the future.
        """
        type_, schema = record.event.type, record.event.schema
        is_known, is_taken = bool(self.versions(type_)), (type_, schema) in self.wanted
        if not is_taken and not is_known and "order" not in self.names:
            return f"skip *.{type_}"
        if not is_taken and is_known and not {"order", f"order.{type_}"} & {*self.names}:
            has_others = any(type_ == one for one, _ in self.wanted)
            return f"skip order.{type_}" + (f".v{schema}" if has_others else "")
        if record.flaw not in ("not JSON", "missing id", "malformed id") and record.event.id > latest:
            return "id from the future"
        if is_taken or record.flaw in ("not JSON", "missing id", "malformed id"):
            return record.flaw
        return "unknown schema version" if is_known else "unknown event type"


def real_id(number: int, days_ago: int = 0) -> str:
    """A UUIDv7 that no other number has."""
    return str(UUID(int=(NOW_MS - days_ago * DAY_MS + number) << 80 | 7 << 76 | 2 << 62 | number))


def day_of(event_id: str) -> date:
    return datetime.fromtimestamp(int(event_id.replace("-", "")[:12], 16) / 1000, UTC).date()


def real_uuid4(number: int) -> str:
    """A UUID that is no UUIDv7."""
    return str(UUID(int=4 << 76 | 2 << 62 | number))


@dataclass
class Row:
    """A record at the place where it was first: of a batch, or a dead letter, which has a reason and a status."""

    record: Record
    topic: int
    offset: int
    reason: str = ""
    is_event: bool = True
    status: str = "open"

    @property
    def place(self) -> tuple[int, int]:
        return self.topic, self.offset

    @property
    def event(self) -> Event:
        """Its event, or what a record that is no event was made of."""
        return self.record.event


@dataclass
class Around:
    """Surroundings of the sink: events that the projection refuses, and that the transform leaves out or fails for."""

    refused: frozenset[str] = frozenset()
    filtered: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    horizon: str = ""
    latest: str = ""  # an event with a greater id is from the future
    is_ordered: bool = False


@dataclass
class Sink:
    """A sink. ``fates``: the state of each event that it was given; ``trail``: how often each was applied."""

    job: Job
    topic: int = 1
    position: int | None = None
    based: int = 0  # what lies below was part of the source's state, or the source has forgotten it
    is_whole: bool = True  # the topic that it reads has had every event that it ever read
    has_asked: bool = True  # it has started once; only the copy of a rebuild is there before
    ids: dict[str, set[str]] = field(default_factory=lambda: {"dedup": set(), "merge": set()})  # by strategy
    versions: set[tuple[str, int]] = field(default_factory=set)
    highest: dict[str, int] = field(default_factory=dict)
    bases: dict[str, int] = field(default_factory=dict)
    letters: dict[str, Row] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)
    fates: dict[str, str] = field(default_factory=dict)
    trail: Counter[str] = field(default_factory=Counter)
    book: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.position or 0

    def open(self, names: Iterable[str] | None = None) -> list[str]:
        """The open letters, or those of these names."""
        found = [name for name, letter in self.letters.items() if letter.status == "open"]
        return found if names is None else [name for name in found if name in set(names)]

    def deliver(self, around: Around, job: Job, records: Sequence[Record], start: int) -> Counter[str]:
        """A batch of the topic from an offset on, to a driver that was started with a job."""
        rows, counts = list[Row](), Counter[str]()
        for offset, record in enumerate(records, start):
            verdict = job.judge(record, around.latest)
            if verdict.startswith("skip "):
                counts["skipped"] += 1
                self.skipped.add(verdict.removeprefix("skip "))
                self.fates.setdefault(record.event.id, NOT_ASKED)
            elif verdict:
                counts["dead"] += 1
                self.letters.setdefault(record.name, Row(record, self.topic, offset, verdict, is_event=False))
            else:
                rows.append(Row(record, self.topic, offset))
        known = [row for row in rows if self._is_resolved(row)]
        self._apply(around, [row for row in rows if row not in known], counts)
        counts["duplicates"] += len(known)
        self.position = max(self.end, start + len(records))
        return counts

    def _is_resolved(self, row: Row) -> bool:
        """Whether its letter is closed. What was discarded is one record, if that was no event."""
        letter = self.letters.get(row.event.id)
        if letter is None or (letter.status == "open" and not letter.is_event):
            return False
        is_same = letter.record == row.record or letter.place == row.place
        return letter.status != "discarded" or letter.is_event or is_same

    def replay(self, around: Around, names: Collection[str], *, is_older: bool = False) -> Counter[str]:
        """Replay open letters and those that are parked behind them: of each topic in one batch."""
        keys = {self.letters[name].event.key for name in self.open(names)}
        rows, counts = list[Row](), Counter[str]()
        for name in self.open():
            letter = self.letters[name]
            is_chosen = name in names or (letter.reason == PARKED and letter.event.key in keys)
            if not is_chosen or (is_older and letter.reason != OLDER):
                continue
            if verdict := self.job.judge(letter.record, around.latest):
                counts["rejected"] += 1
                if letter.reason != OLDER:
                    letter.reason = NOT_ASKED if verdict.startswith("skip ") else verdict
            else:
                rows.append(letter)
        for topic in sorted({row.topic for row in rows}):
            mine = sorted((row for row in rows if row.topic == topic), key=lambda row: row.offset)
            self._apply(around, mine, counts, is_replay=True, is_older=is_older)
        return counts

    def _apply(
        self,
        around: Around,
        rows: Sequence[Row],
        counts: Counter[str],
        *,
        is_replay: bool = False,
        is_older: bool = False,
    ) -> None:
        based = [row for row in rows if self._is_based(row)]
        for row in based:
            self._close(row.event.id)
            self.fates[row.event.id] = "applied"
        rows = [row for row in rows if row not in based]
        rejected: dict[str, str] = {}
        new = self._select(around, rows, rejected)
        chosen = {row.event.id for row in new}
        for row in rows:
            if row.event.id not in chosen and self._is_admitted(row, is_replay=is_replay, is_older=is_older):
                new.append(row)
                rejected.pop(row.event.id, None)
        filtered = [row for row in new if row.event.id in around.filtered]
        rejected |= {row.event.id: "transform failed" for row in new if row.event.id in around.failing}
        new = [row for row in new if row.event.id not in around.filtered | around.failing]
        rejected |= {row.event.id: "unwelcome" for row in new if row.event.id in around.refused}
        if around.is_ordered:
            self._park(rows, new, rejected)
        new = [row for row in new if row.event.id not in rejected]
        for row in rows:
            if row.event.id in rejected:
                self._set_aside(row, rejected[row.event.id])
        self._add(new)
        for row in (row for row in rows if row.event.id not in rejected):
            self._close(row.event.id)
            if row in new or row in filtered:
                self.fates[row.event.id] = "filtered" if row in filtered else "applied"
            self.fates.setdefault(row.event.id, "applied")
        counts.update(applied=len(new), rejected=len(rejected), filtered=len(filtered))
        counts["duplicates"] += len(based) + len(rows) - len(new) - len(rejected) - len(filtered)

    def _is_based(self, row: Row) -> bool:
        base = self.bases.get(row.event.key)
        has_passed = row.topic == self.topic and row.offset < self.based
        return base is not None and (has_passed or row.event.version <= base)

    def _select(self, around: Around, rows: Sequence[Row], rejected: dict[str, str]) -> list[Row]:
        """Rows that the strategy does not know; it knows them from now on."""
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
        ids = self.ids[self.job.strategy]
        known = ids if self.job.strategy == "merge" else set()
        rejected |= {row.event.id: OLDER for row in rows if row.event.id < around.horizon and row.event.id not in known}
        new = {row.event.id: row for row in reversed(rows) if row.event.id not in ids | rejected.keys()}
        ids.update(new)
        return [row for row in new.values() if row.event.id >= around.horizon]

    def _is_admitted(self, row: Row, *, is_replay: bool, is_older: bool) -> bool:
        """Whether it is let in because of its open letter, though the strategy knows it."""
        letter = self.letters.get(row.event.id)
        if letter is None or letter.status != "open":
            return False
        if self.job.strategy == "offsets":
            return is_replay or letter.place == row.place
        return is_replay and (is_older or (letter.is_event and letter.reason != OLDER))

    def _park(self, rows: Sequence[Row], new: Sequence[Row], rejected: dict[str, str]) -> None:
        """Set aside what comes behind a record, or an event with a lower version, that is set aside."""
        letters = [self.letters[name] for name in {*self.open()} - {row.event.id for row in rows}]
        for row in new:
            records = [one for one in letters if one.event.key == row.event.key and not one.is_event]
            if any(one.offset < row.offset if one.topic == row.topic else one.topic != self.topic for one in records):
                rejected[row.event.id] = PARKED
        aside = [row.event for row in rows if row.event.id in rejected] + [one.event for one in letters if one.is_event]
        for row in new:
            if any(one.key == row.event.key and one.version < row.event.version for one in aside):
                rejected[row.event.id] = PARKED

    def _set_aside(self, row: Row, reason: str) -> None:
        """A letter of the event that there is stays, with another reason; one of a record that is no event goes."""
        known = self.letters.get(row.event.id)
        if known is None or not known.is_event or known.status != "open":
            self.letters[row.event.id] = Row(row.record, row.topic, row.offset, reason)
        elif known.reason != OLDER:
            known.reason = reason
        self.fates[row.event.id] = "set aside"

    def _add(self, new: Sequence[Row]) -> None:
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
        for one in self.open([name]):
            self.letters[one].status = "replayed"

    def discard(self, names: Collection[str]) -> int:
        """Give letters up, for good."""
        for name in (chosen := self.open(names)):
            self.letters[name].status = "discarded"
            if self.letters[name].is_event:
                self.fates[name] = "discarded"
        return len(chosen)

    def is_startable(self, job: Job) -> bool:
        """Whether the job asks for what the sink was asked for, or for more that no topic has had yet."""
        if self.position is None or not self.has_asked:
            return True
        is_more = job.strategy == self.job.strategy and job.asked >= self.job.asked
        return is_more and (job.asked == self.job.asked or not job.wanted_names & self.skipped)

    def decide(self, job: Job) -> bool:
        """A person has decided that it asks for this from now on; whether that is something else."""
        is_changed = (job.strategy, job.asked) != (self.job.strategy, self.job.asked)
        self.job, self.has_asked = job, True
        self.skipped -= job.wanted_names
        return is_changed

    def copy(self, job: Job) -> Sink:
        """The copy of a rebuild from the topic by a job: it has nothing yet but what was discarded."""
        discarded = {name: replace(one) for name, one in self.letters.items() if one.status == "discarded"}
        fates = {name: "discarded" for name, one in discarded.items() if one.is_event}
        return Sink(job, self.topic, 0, has_asked=False, letters=discarded, fates=fates)

    def rebuild_from_source(self, source: Mapping[str, tuple[int, int]], first: int) -> None:
        """Take the source's totals and versions by key: what the sink has passed by now is part of them."""
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
        for name in self.open():
            if self.letters[name].is_event and self.letters[name].event.key in self.bases:
                self._close(name)
                self.fates[name] = "applied"

    def forget(self, horizon: str, kept: Collection[str], on_topic: Collection[str]) -> None:
        """Retention: letters that are not ``kept`` must be of no use, and ids below the horizon are unknown."""
        for ids in self.ids.values():
            ids -= {one for one in ids if one < horizon}
        for name in self.letters.keys() - set(kept):
            letter = self.letters.pop(name)
            assert letter.status != "open", f"{name} is open"
            assert not (letter.status == "discarded" and letter.is_event), f"{name} says what is not due"
            assert name not in on_topic, f"{name} is on the topic"
