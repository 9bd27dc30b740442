"""An incremental check finds what a full one finds, or doubts; on histories written by hand and by chance. No JVM."""

from __future__ import annotations

import random
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path

import msgspec
import pytest

from outbox.audit import verified
from outbox.audit.report import Report
from outbox.audit.sinks import Letter, TopicOffset
from outbox.audit.source import LATE_MS
from outbox.audit.verified import Doubt, TopicPoint, Verified
from outbox.base.settings import DatabaseUrl, Settings, load
from outbox.sink.comparison_files import AddsLine, Comparison
from outbox_lab.testing.helpers import chosen_seed, seeded
from tests.support import audit_chain
from tests.support.audit_chain import (
    MINUTE_MS,
    NOW_MS,
    STOCK,
    STOCK_TOPIC,
    Chain,
    Made,
    codes,
    declare,
    invalid,
    letter,
    only_comparison,
    only_sink,
)

HISTORIES = 60


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load(tmp_path, environment=False)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(declare(tmp_path))


def point(chain: Chain) -> Verified:
    """The point that a check without findings verifies."""
    report = chain.compare(Verified("test"))
    assert report.verified is not None, codes(report)
    return report.verified


def sane(chain: Chain) -> Verified:
    """A history of which everything is verified, long ago."""
    long_ago = NOW_MS - 2 * LATE_MS
    events = [*chain.written("a", "5", "-2", at_ms=long_ago), *chain.written("b", "7", at_ms=long_ago)]
    chain.publish(*events)
    chain.applied({"a": "3", "b": "7"})
    return point(chain)


def of_stock(point: Verified | None) -> TopicPoint:
    """The point of the topic that the tests are about."""
    assert point is not None
    return point.topic(STOCK_TOPIC)


def as_usual(chain: Chain, key: str = "a") -> None:
    """One more event goes through the chain."""
    chain.publish(chain.more(key, "4"))
    chain.applied({key: str(total) for key, total in chain.totals.items()})


def result(report: Report) -> tuple[object, ...]:
    sink = only_sink(report)
    of_sink = (sink.drift, sink.in_flight, sink.lost, only_comparison(report).uncertain)
    return codes(report), report.in_flight, report.lost, *of_sink


def agree(chain: Chain, since: Verified, *expected: str) -> Report:
    """The report of an incremental check, which finds what a full one finds: these codes."""
    report, everything = chain.compare(since), chain.compare()
    assert result(report) == result(everything)
    assert codes(report) == list(expected)
    return report


# What it reads ------------------------------------------------------------------------------------------------------


def test_what_came_since_is_read_and_the_result_is_the_same(chain: Chain) -> None:
    since = sane(chain)
    stock = of_stock(since)
    assert (stock.next_offsets, stock.keys) == ({0: 3, 1: 0}, {"a": (1, 2, 0), "b": (1, 1, 0)})
    assert all(event.row.occurred_ms < stock.since_ms for event in chain.outbox), "rows from before are not read"
    as_usual(chain)
    report = agree(chain, since)
    assert (report.settled, report.records, report.outbox_events) == (True, 1, 1)
    assert of_stock(report.verified).next_offsets == {0: 4, 1: 0}


def test_a_point_is_where_the_slowest_sink_is(chain: Chain) -> None:
    chain.publish(*chain.written("a", "5", "-2", "1"))
    chain.applied({"a": "3"}, positions={0: 2})
    found = of_stock(point(chain))
    assert (found.next_offsets, found.keys) == ({0: 2, 1: 0}, {"a": (1, 2, 0)})


def test_an_event_of_a_transaction_that_was_open_is_found_lost(chain: Chain) -> None:
    since = sane(chain)
    as_usual(chain)
    chain.more("c", at_ms=NOW_MS - LATE_MS + MINUTE_MS)
    as_usual(chain, "c")
    assert codes(chain.compare(since)) == codes(chain.compare()) != []


# Doubts -------------------------------------------------------------------------------------------------------------


def repeat_version(chain: Chain) -> None:
    chain.outbox.append(chain.event("a", 2, "9"))
    chain.publish(chain.outbox[-1])


@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(lambda chain: chain.applied({}, positions={0: 1}), id="restored sink"),
        pytest.param(lambda chain: chain.applied({}, positions={}), id="forgotten sink"),
        pytest.param(lambda chain: chain.versions[STOCK_TOPIC].update(a=1), id="restored source"),
        pytest.param(lambda chain: chain.versions[STOCK_TOPIC].pop("b"), id="deleted key"),
        pytest.param(lambda chain: chain.publish(chain.outbox[0]), id="repeated event"),
        pytest.param(repeat_version, id="repeated version"),
        pytest.param(lambda chain: chain.publish(chain.event("z", 1, "9")), id="foreign event"),
    ],
)
def test_what_is_unusual_is_a_doubt(chain: Chain, unusual: Callable[[Chain], object]) -> None:
    since = sane(chain)
    unusual(chain)
    with pytest.raises(Doubt):
        chain.compare(since)


def test_an_event_in_flight_is_read_again_however_old(chain: Chain) -> None:
    events = chain.written("a", "5", "-2", at_ms=NOW_MS - 3 * LATE_MS)
    chain.publish(events[0])
    chain.applied({"a": "5"})
    since = point(chain)
    assert of_stock(since).since_ms <= events[1].row.occurred_ms
    chain.publish(events[1])
    chain.applied({"a": "3"})
    assert agree(chain, since).records == 1


def test_an_event_on_another_partition_than_those_of_before_is_found(chain: Chain) -> None:
    since = sane(chain)
    chain.publish(chain.more("a", "4"), partition=1)
    chain.applied({"a": "7", "b": "7"})
    agree(chain, since, "keys-spread")


# By chance ----------------------------------------------------------------------------------------------------------


FAULTS = ("skip", "repeat", "forge", "break", "stray")


class Chance:
    """Lets a chain run, and sometimes go wrong."""

    def __init__(self, chain: Chain, choices: random.Random) -> None:
        self._chain, self._random = chain, choices
        self._unsent: list[Made] = []
        self._valid: dict[str, tuple[Made, TopicOffset]] = {}  # by id, the events on the topic
        self._letters: dict[str, Letter] = {}
        self._set_aside: set[str] = set()  # events that are not in the sink's totals
        chain.now_ms = NOW_MS - 8 * LATE_MS

    def run(self, steps: int, faults: float) -> None:
        """Write, relay and apply; each step may be a fault."""
        for _ in range(steps):
            self._chain.now_ms += self._random.randrange(2 * MINUTE_MS)
            assert self._chain.now_ms < NOW_MS
            change = str(self._random.randint(-5, 5))
            self._unsent.append(self._chain.more(self._random.choice("abc"), change, self._chain.now_ms))
            if self._random.random() < 0.7:
                self._relay(faults)
            if self._random.random() < 0.7:
                self._apply(faults)

    def _relay(self, faults: float) -> None:
        while self._unsent and self._random.random() < 0.8:
            event = self._unsent.pop(0)
            fault = self._random.choice(FAULTS) if self._random.random() < faults else ""
            partition = (ord(event.row.key) + (fault == "stray")) % 2
            if fault == "forge":
                version = max(1, (event.row.version or 0) + self._random.randint(-2, 2))
                self._publish(self._chain.event(event.row.key, version), partition)
            if fault == "break":
                self._chain.publish(event, partition=partition, change=None)
            elif fault != "skip":
                for _ in range(1 + (fault == "repeat")):
                    self._publish(event, partition)

    def _publish(self, event: Made, partition: int) -> None:
        [place] = self._chain.publish(event, partition=partition)
        self._valid.setdefault(event.event_id, (event, place))

    def _apply(self, faults: float) -> None:
        """The sink applies what is on the topic, each event once; sometimes it loses or adds something, or reads all
        again and sets an event aside.
        """
        if self._valid and self._random.random() < faults:
            self._read_again(*self._random.choice(list(self._valid.values())))
        totals: dict[str, Decimal] = {}
        for event_id, (event, _) in self._valid.items():
            if event_id not in self._set_aside:
                totals[event.row.key] = totals.get(event.row.key, Decimal(0)) + Decimal(str(event.payload["change"]))
        if totals and self._random.random() < faults:
            totals[self._random.choice(list(totals))] += 1
        self._chain.applied({key: str(total) for key, total in totals.items()}, letters=dict(self._letters))

    def _read_again(self, event: Made, place: TopicOffset) -> None:
        """A rebuild, or a rewind of a sink that has applied the event; its letter is discarded in between, or open."""
        if event not in self._chain.outbox:
            return
        made = letter if self._random.random() < 0.5 else partial(invalid, place=place)
        self._letters |= made(event, is_open=self._random.random() < 0.5, origin=place)
        if self._random.random() < 0.5:
            self._set_aside.add(event.event_id)


def test_an_incremental_check_finds_what_a_full_one_finds(tmp_path: Path) -> None:
    seed = chosen_seed()
    declared = declare(tmp_path)
    compared, doubts, wrong = 0, 0, 0
    for number in range(HISTORIES):
        chain = Chain(declared)
        chance = Chance(chain, seeded(seed, number))
        chance.run(20, faults=0)
        since = point(chain)
        assert any(of_stock(since).next_offsets.values())
        chance.run(10, faults=0.1)
        expected = chain.compare()
        wrong += bool(expected.findings)
        try:
            found = chain.compare(since)
        except Doubt:
            doubts += 1
        else:
            compared += 1
            assert result(found) == result(expected), number
    assert min(compared, doubts, wrong) > HISTORIES // 20


# Its file -----------------------------------------------------------------------------------------------------------


def stored(chain: Chain, settings: Settings) -> Verified:
    """A point that is in the file."""
    since = msgspec.structs.replace(sane(chain), of=verified.identity(settings, chain.declared))
    verified.store(settings, since)
    return since


def test_a_point_is_of_no_use_for_a_stricter_contract(
    chain: Chain, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(chain, settings)
    younger = settings.replace(sink_id_age_max_days=1)
    assert verified.load(younger, chain.declared).is_beginning
    stricter = {**audit_chain.EVENTS["stock/changed.v1"], "change": {"type": "number", "minimum": 0}}
    monkeypatch.setitem(audit_chain.EVENTS, "stock/changed.v1", stricter)
    (tmp_path / "stricter").mkdir()
    assert verified.load(settings, declare(tmp_path / "stricter")).is_beginning


def test_a_point_is_stored_and_of_use_for_the_same_only(chain: Chain, settings: Settings, tmp_path: Path) -> None:
    assert verified.load(settings, chain.declared).is_beginning
    since = stored(chain, settings)
    assert verified.load(settings, chain.declared) == since
    other = settings.replace(source_db_url=DatabaseUrl(name="elsewhere"))
    assert verified.load(other, chain.declared).is_beginning
    count = Comparison(Path("count.sql"), (AddsLine(1, None),), "")
    for names, comparisons in ((["stock.changed"], [STOCK]), (["stock"], [STOCK, count])):
        (folder := tmp_path / f"with {len(comparisons)}").mkdir()
        changed = declare(folder, names=names, comparisons=comparisons)
        assert verified.load(settings, changed).is_beginning, names
    [file] = (settings.home / "check").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    assert verified.load(settings, chain.declared).is_beginning, "it is cut off"
