"""An incremental check finds what a full one finds, or doubts; on histories written by hand and by chance. No JVM."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from outbox.audit import verified
from outbox.audit.comparison_files import AddsLine, Comparison
from outbox.audit.letters import Letter, TopicOffset
from outbox.audit.quantity import number_of
from outbox.audit.report import Report
from outbox.audit.source import LATE_MS
from outbox.audit.verified import Doubt, TopicPoint, Verified
from outbox.base.settings import Settings, load
from outbox.sink.decoding.decoder import DecodedEvent
from outbox_lab.testing.seeds import chosen_seed, seeded
from tests.support import audit_chain
from tests.support.audit_chain import (
    MINUTE_MS,
    NOW_MS,
    SINK,
    STOCK,
    Chain,
    codes,
    declare,
    only_comparison,
    only_sink,
)

HISTORIES = 60
STOCK_TOPIC = "chain.stock"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(tmp_path, environment=False)


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    found = Chain(declare(tmp_path), keeps_records=True)
    with closing(found.logs):
        yield found


def point(chain: Chain) -> Verified:
    """The point that a check without findings verifies."""
    report = chain.compare_since(Verified("test"))
    assert report.verified is not None, codes(report)
    return report.verified


def sane(chain: Chain) -> Verified:
    """A history of which everything is verified, long ago."""
    long_ago = NOW_MS - 2 * LATE_MS
    events = [*chain.written("a", "5", "-2", at_ms=long_ago), *chain.written("b", "7", at_ms=long_ago)]
    chain.publish(*events)
    chain.applied({"a": "3", "b": "7"})
    return point(chain)


def versions_of(chain: Chain) -> dict[str, int]:
    """The versions in the source."""
    assert chain.versions is not None
    return chain.versions[STOCK_TOPIC]


def more(chain: Chain, key: str = "a", change: str = "4") -> None:
    """One more event of a key, in the outbox and applied by the sink; not on the topic."""
    versions_of(chain)[key] = versions_of(chain).get(key, 0) + 1
    chain.totals[key] = chain.totals.get(key, Decimal(0)) + Decimal(change)
    chain.outbox.append(chain.event(key, versions_of(chain)[key], change))


def of_stock(point: Verified | None) -> TopicPoint:
    """The point of the topic that the tests are about."""
    assert point is not None
    return point.topic(STOCK_TOPIC)


def as_usual(chain: Chain) -> None:
    """The last event goes through the chain."""
    chain.publish(chain.outbox[-1])
    chain.applied({key: str(total) for key, total in (chain.totals or {}).items()})


# What it reads ------------------------------------------------------------------------------------------------------


def test_what_came_since_is_read_and_the_result_is_the_same(chain: Chain) -> None:
    since = sane(chain)
    stock = of_stock(since)
    assert (stock.next_offsets, stock.records, stock.versions) == ({0: 3, 1: 0}, 3, {"a": (1, 2), "b": (1, 1)})
    more(chain)
    as_usual(chain)
    report, everything = chain.compare_since(since), chain.compare()
    assert (codes(report), report.settled, report.verified_before) == ([], True, 3)
    assert (report.records, report.outbox_events) == (everything.records, everything.outbox_events) == (4, 4)
    assert of_stock(report.verified).next_offsets == {0: 4, 1: 0}


def test_duplicates_and_pruned_events_from_before_are_counted(chain: Chain) -> None:
    events = chain.written("a", "5", "-2", at_ms=NOW_MS - 2 * LATE_MS)
    chain.publish(*events, events[0])
    chain.prune(events[0])
    chain.applied({"a": "3"})
    since = point(chain)
    more(chain)
    as_usual(chain)
    report, everything = chain.compare_since(since), chain.compare()
    assert (report.duplicates, report.pruned) == (everything.duplicates, everything.pruned) == (1, 1)
    assert (report.records, report.outbox_events) == (everything.records, everything.outbox_events) == (4, 2)


def test_rows_from_before_are_not_read(chain: Chain) -> None:
    since = sane(chain)
    assert all(event.row.occurred_ms < of_stock(since).since_ms for event in chain.outbox)


def test_a_point_is_where_the_slowest_sink_is(chain: Chain) -> None:
    chain.publish(*chain.written("a", "5", "-2", "1"))
    chain.applied({"a": "3"}, positions={0: 2})
    assert of_stock(point(chain)).next_offsets == {0: 2, 1: 0}
    assert of_stock(point(chain)).versions == {"a": (1, 2)}


def test_an_event_in_flight_is_read_again_however_old(chain: Chain) -> None:
    events = chain.written("a", "5", "-2", at_ms=NOW_MS - 3 * LATE_MS)
    chain.publish(events[0])
    chain.applied({"a": "5"})
    since = point(chain)
    assert of_stock(since).since_ms <= events[1].row.occurred_ms
    chain.publish(events[1])
    chain.applied({"a": "3"})
    report = chain.compare_since(since)
    assert (codes(report), report.settled, report.records) == ([], True, 2)


def test_an_event_of_a_transaction_that_was_open_is_found_lost(chain: Chain) -> None:
    since = sane(chain)
    more(chain)
    as_usual(chain)
    late = chain.event("c", 1, "1", NOW_MS - LATE_MS + MINUTE_MS)
    chain.outbox.append(late)
    versions_of(chain)["c"], chain.totals["c"] = 2, Decimal(2)
    chain.outbox.append(chain.event("c", 2, "1"))
    as_usual(chain)
    assert codes(chain.compare_since(since)) == codes(chain.compare()) != []


def test_a_discarded_event_stays_acknowledged(chain: Chain) -> None:
    """Its record is before the point: the letter says what it would have added."""
    events = chain.written("a", "5", "6", at_ms=NOW_MS - 2 * LATE_MS)
    chain.publish(*events)
    row = events[1].row
    letter = Letter(
        STOCK_TOPIC, "a", is_open=False, kind=row.kind, version=row.version, numbers=tuple(map(number_of, row.numbers))
    )
    chain.applied({"a": "5"}, letters={events[1].event_id: letter})
    since = point(chain)
    more(chain)
    chain.publish(chain.outbox[-1])
    chain.applied({"a": "9"})
    report, everything = chain.compare_since(since), chain.compare()
    assert (codes(report), codes(everything), report.verified_before) == ([], [], 2)


def test_a_discarded_invalid_record_stays_acknowledged(chain: Chain) -> None:
    events = chain.written("a", "5", "6", at_ms=NOW_MS - MINUTE_MS)
    chain.publish(events[0])
    chain.publish(events[1], change="six")
    chain.acknowledged = {events[1].event_id}
    letter = Letter(STOCK_TOPIC, "a", is_open=False, place=TopicOffset(0, 1), is_event=False)
    chain.applied({"a": "5"}, letters={events[1].event_id: letter})
    since = point(chain)
    assert (of_stock(since).records, of_stock(since).acknowledged) == (2, 1)
    report, everything = chain.compare_since(since), chain.compare()
    assert (codes(report), report.settled, report.records) == ([], True, 2)
    assert (codes(everything), everything.settled, everything.records) == ([], True, 2)
    assert [one.topic(STOCK_TOPIC).malformed.acknowledged for one in (report, everything)] == [1, 1]


def test_a_topic_without_versions_in_the_source_is_read_whole(chain: Chain) -> None:
    sane(chain)
    assert chain.versions is not None
    del chain.versions[STOCK_TOPIC]
    since = point(chain)
    assert (set(since.topics), of_stock(since).since_ms) == ({"chain.order"}, 0)
    report = chain.compare_since(since)
    assert (codes(report), report.records, report.verified_before) == ([], 3, 0)


# Doubts -------------------------------------------------------------------------------------------------------------


def restore_sink(chain: Chain) -> None:
    chain.sink = replace(chain.sink, positions={STOCK_TOPIC: {0: 1}})


def forget_sink(chain: Chain) -> None:
    chain.sink = replace(chain.sink, positions={})


def restore_source(chain: Chain) -> None:
    versions_of(chain)["a"] -= 1


def delete_key(chain: Chain) -> None:
    del versions_of(chain)["b"]


def repeat(chain: Chain) -> None:
    chain.publish(chain.outbox[0])


def repeat_version(chain: Chain) -> None:
    chain.outbox.append(chain.event("a", 2, "9"))
    chain.publish(chain.outbox[-1])


def forge(chain: Chain) -> None:
    chain.publish(chain.event("z", 1, "9"))


def letter_of(chain: Chain, number: int, *, is_valid: bool, is_open: bool = True) -> dict[str, Letter]:
    """A dead letter of the first record of the outbox's event with this number."""
    made = chain.outbox[number]
    place = next(place for _, record, place in chain.records if record.key == made.row.key.encode())
    letter = Letter(STOCK_TOPIC, made.row.key, is_open, place=place, is_event=False, origin=place)
    if is_valid:
        row = made.row
        letter = letter._replace(
            place=None, is_event=True, kind=row.kind, version=row.version, numbers=tuple(map(number_of, row.numbers))
        )
    return {made.event_id: letter}


def refuse_in_a_rebuild(chain: Chain) -> None:
    """The projection refuses what it has taken before."""
    chain.applied({"a": "-2", "b": "7"}, letters=letter_of(chain, 0, is_valid=True))


def refuse_in_a_rewind(chain: Chain) -> None:
    """The sink has applied the event, and sets it aside when it reads the event again."""
    chain.applied({"a": "3", "b": "7"}, letters=letter_of(chain, 0, is_valid=True))


def invalidate_in_a_rebuild(chain: Chain) -> None:
    """As with a lower OUTBOX_SINK_ID_AGE_MAX_DAYS, or an upcaster that fails."""
    chain.applied({"a": "-2", "b": "7"}, letters=letter_of(chain, 0, is_valid=False))


def invalidate_in_a_rewind(chain: Chain) -> None:
    chain.applied({"a": "3", "b": "7"}, letters=letter_of(chain, 0, is_valid=False))


@pytest.mark.parametrize(
    "unusual",
    [
        restore_sink,
        forget_sink,
        restore_source,
        delete_key,
        repeat,
        repeat_version,
        forge,
        refuse_in_a_rebuild,
        refuse_in_a_rewind,
        invalidate_in_a_rebuild,
        invalidate_in_a_rewind,
    ],
    ids=lambda one: one.__name__,
)
def test_what_is_unusual_is_a_doubt(chain: Chain, unusual: Callable[[Chain], None]) -> None:
    since = sane(chain)
    unusual(chain)
    with pytest.raises(Doubt):
        chain.compare_since(since)


def test_an_event_on_another_partition_than_those_of_before_is_found(chain: Chain) -> None:
    since = sane(chain)
    more(chain)
    chain.publish(chain.outbox[-1], partition=1)
    chain.applied({"a": "7", "b": "7"})
    assert codes(chain.compare_since(since)) == codes(chain.compare()) == ["keys-spread"]


def test_a_letter_of_a_verified_event_that_is_discarded_is_a_doubt(chain: Chain) -> None:
    since = sane(chain)
    chain.applied({"a": "4", "b": "7"}, letters=letter_of(chain, 0, is_valid=False, is_open=False))
    assert codes(chain.compare()) == ["sink-drift"]
    with pytest.raises(Doubt):
        chain.compare_since(since)


def test_a_letter_of_what_came_since_is_no_doubt(chain: Chain) -> None:
    since = sane(chain)
    more(chain, "c")
    chain.publish(chain.outbox[-1])
    chain.applied({"a": "3", "b": "7"}, letters=letter_of(chain, 3, is_valid=True))
    assert codes(chain.compare_since(since)) == codes(chain.compare()) == ["sink-parked"]


def test_a_rewind_is_no_doubt_and_totals_show_its_changes(chain: Chain) -> None:
    """A rewind leaves the positions as they are (`outbox.sink.repair.rewind`)."""
    since = sane(chain)
    assert codes(chain.compare_since(since)) == []
    chain.applied({"a": "8", "b": "7"})
    assert codes(chain.compare_since(since)) == codes(chain.compare()) == ["sink-drift"]


# By chance ----------------------------------------------------------------------------------------------------------


FAULTS = ("skip", "repeat", "forge", "break", "stray")


class Chance:
    """Lets a chain run, and sometimes go wrong."""

    def __init__(self, chain: Chain, choices: random.Random) -> None:
        self._chain, self._random = chain, choices
        self._unsent: list[int] = []  # places in the outbox
        self._letters: dict[str, Letter] = {}
        self._set_aside: set[str] = set()  # events that are not in the sink's totals
        chain.now_ms = NOW_MS - 8 * LATE_MS

    def run(self, steps: int, faults: float) -> None:
        """Write, relay and apply; each step may be a fault."""
        for _ in range(steps):
            self._chain.now_ms += self._random.randrange(2 * MINUTE_MS)
            assert self._chain.now_ms < NOW_MS
            self._write()
            if self._random.random() < 0.7:
                self._relay(faults)
            if self._random.random() < 0.7:
                self._apply(faults)

    def _write(self) -> None:
        chain, key = self._chain, self._random.choice("abc")
        versions = versions_of(chain)
        versions[key] = versions.get(key, 0) + 1
        change = self._random.randint(-5, 5)
        chain.totals[key] = chain.totals.get(key, Decimal(0)) + change
        self._unsent.append(len(chain.outbox))
        chain.outbox.append(chain.event(key, versions[key], str(change), chain.now_ms))

    def _relay(self, faults: float) -> None:
        chain = self._chain
        while self._unsent and self._random.random() < 0.8:
            event = chain.outbox[self._unsent.pop(0)]
            partition = ord(event.row.key) % 2
            fault = self._random.choice(FAULTS) if self._random.random() < faults else ""
            if fault == "stray":
                partition = 1 - partition
            if fault == "forge":
                version = (event.row.version or 0) + self._random.randint(-2, 2)
                chain.publish(chain.event(event.row.key, version), partition=partition)
            if fault != "skip":
                chain.publish(event, partition=partition, **({"change": None} if fault == "break" else {}))
            if fault == "repeat":
                chain.publish(event, partition=partition)

    def _apply(self, faults: float) -> None:
        """The sink applies what is on the topic, each event once; sometimes it loses or adds something, or reads all
        again and sets an event aside.
        """
        chain = self._chain
        known: dict[str, tuple[str, Decimal, TopicOffset]] = {}
        decoder = chain.declared.sinks[SINK].decoders[STOCK_TOPIC]
        for _, record, place in chain.records:
            found = decoder.record(record)
            if isinstance(found, DecodedEvent):
                names = [column.name for column in decoder.types[found.name]]
                values = dict(zip(names, found.values, strict=True))
                known.setdefault(found.event_id, (str(values["item"]), Decimal(str(values["change"])), place))
        if known and self._random.random() < faults:
            event_id = self._random.choice(list(known))
            self._read_again(event_id, known[event_id][2])
        totals: dict[str, Decimal] = {}
        for event_id, (key, change, _) in known.items():
            if event_id not in self._set_aside:
                totals[key] = totals.get(key, Decimal(0)) + change
        if totals and self._random.random() < faults:
            totals[self._random.choice(list(totals))] += 1
        chain.applied({key: str(total) for key, total in totals.items()}, letters=dict(self._letters))

    def _read_again(self, event_id: str, place: TopicOffset) -> None:
        """A rebuild, or a rewind of a sink that has applied the event; its letter is discarded in between, or open."""
        row = next((made.row for made in self._chain.outbox if made.event_id == event_id), None)
        if row is None:
            return
        is_open = self._random.random() < 0.5
        letter = Letter(STOCK_TOPIC, row.key, is_open, place=place, is_event=False, origin=place)
        if self._random.random() < 0.5:
            letter = letter._replace(
                place=None,
                is_event=True,
                kind=row.kind,
                version=row.version,
                numbers=tuple(map(number_of, row.numbers)),
            )
        self._letters[event_id] = letter
        if self._random.random() < 0.5:
            self._set_aside.add(event_id)


def result(report: Report) -> tuple[object, ...]:
    sink = only_sink(report)
    counts = (report.records, report.outbox_events, report.duplicates, report.missing_versions, report.in_flight)
    return (
        codes(report),
        *counts,
        report.lost,
        report.pruned,
        sink.drift,
        sink.in_flight,
        sink.lost,
        only_comparison(report).uncertain,
    )


def test_an_incremental_check_finds_what_a_full_one_finds(tmp_path: Path) -> None:
    seed = chosen_seed()
    declared = declare(tmp_path)
    compared, doubts, wrong = 0, 0, 0
    for number in range(HISTORIES):
        chain = Chain(declared, keeps_records=True)
        with closing(chain.logs):
            chance = Chance(chain, seeded(seed, number))
            chance.run(20, faults=0)
            since = point(chain)
            assert of_stock(since).records > 0
            chance.run(10, faults=0.1)
            expected = chain.compare()
            wrong += bool(expected.findings)
            try:
                found = chain.compare_since(since)
            except Doubt:
                doubts += 1
            else:
                compared += 1
                assert result(found) == result(expected), number
    assert min(compared, doubts, wrong) > HISTORIES // 20


# Its file -----------------------------------------------------------------------------------------------------------


def test_a_point_is_of_no_use_for_a_stricter_contract(
    chain: Chain, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    since = msgspec.structs.replace(sane(chain), of=verified.identity(settings, chain.declared))
    verified.store(settings, since)
    younger = settings.model_copy(update={"sink_id_age_max_days": 1})
    assert verified.load(younger, chain.declared).is_beginning
    stricter = {**audit_chain.EVENTS["stock/changed.v1"], "change": {"type": "number", "minimum": 0}}
    monkeypatch.setitem(audit_chain.EVENTS, "stock/changed.v1", stricter)
    (tmp_path / "stricter").mkdir()
    assert verified.load(settings, declare(tmp_path / "stricter")).is_beginning


def test_a_point_is_stored_and_of_use_for_the_same_only(chain: Chain, settings: Settings, tmp_path: Path) -> None:
    since = msgspec.structs.replace(sane(chain), of=verified.identity(settings, chain.declared))
    assert verified.load(settings, chain.declared) == Verified(since.of)
    verified.store(settings, since)
    assert verified.load(settings, chain.declared) == since
    other = settings.model_copy(update={"source_db_name": "elsewhere"})
    assert verified.load(other, chain.declared).is_beginning
    count = Comparison(Path("count.sql"), (AddsLine(1, None),), "")
    for changed in ({"names": ("stock.changed",)}, {"comparisons": (STOCK, count)}):
        folder = tmp_path / str(len(changed["names" if "names" in changed else "comparisons"]))
        folder.mkdir()
        assert verified.load(settings, declare(folder, **changed)).is_beginning, changed


def test_a_file_that_is_cut_off_is_no_point(chain: Chain, settings: Settings) -> None:
    verified.store(settings, msgspec.structs.replace(sane(chain), of=verified.identity(settings, chain.declared)))
    [file] = (settings.home / "check").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert verified.load(settings, chain.declared).is_beginning
