"""The comparison of `outbox check` on histories written by hand: empty, sane, and each kind of wrong. No JVM."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.audit import buckets, versions
from outbox.audit.buckets import Buckets
from outbox.audit.comparison import Observed, compare, compare_states
from outbox.audit.comparison_files import AddsLine, Comparison
from outbox.audit.letters import Letter
from outbox.audit.sinks import Sinks, SinkState
from outbox.audit.source import LATE_MS, Numbers, Source, Written
from outbox.audit.topic_part import TopicOffset, identity_bytes
from outbox.audit.totals import Totals
from outbox.audit.versions import Versions
from outbox.commands.check import as_text, describe
from outbox.sink.decoding.dead_records import identity
from outbox.sink.decoding.records import Record
from tests.support.audit_chain import (
    MINUTE_MS,
    NOW_MS,
    SINK,
    STOCK,
    Chain,
    Made,
    codes,
    declare,
    only_comparison,
    only_sink,
)

STOCK_TOPIC, STOCK_NUMBER = "chain.stock", 1


@pytest.fixture(autouse=True, params=["in memory", "in files"])
def place_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the comparison keeps its rows: it finds the same."""
    if request.param == "in files":
        monkeypatch.setattr(buckets, "PACKED_ROWS", 2)
        monkeypatch.setattr(buckets, "MEMORY_MAX_BYTES", 100)


@pytest.fixture
def chain_of(tmp_path: Path) -> Iterator[Callable[..., Chain]]:
    """Makes a chain that is declared like this."""
    with ExitStack() as logs:

        def make(**options: Any) -> Chain:
            chain = Chain(declare(tmp_path, **options))
            logs.enter_context(closing(chain.logs))
            return chain

        yield make


@pytest.fixture
def chain(chain_of: Callable[..., Chain]) -> Chain:
    return chain_of()


def parked(event: Made, topic: str = STOCK_TOPIC) -> dict[bytes, Letter]:
    """The open dead letter of a valid event."""
    return {event.event_id: letter(event, topic)}


def letter(event: Made, topic: str = STOCK_TOPIC) -> Letter:
    row = event.row
    return Letter(topic, row.key, kind=row.kind, version=row.version, numbers=row.numbers)


def invalid(event: Made, place: TopicOffset, *, is_open: bool = True) -> dict[bytes, Letter]:
    """The dead letter of a record that breaks the contract."""
    return {event.event_id: Letter(STOCK_TOPIC, event.row.key, is_open, place, is_event=False)}


# Sane --------------------------------------------------------------------------------------------------------------


def test_empty_history_is_settled(chain: Chain) -> None:
    report = chain.compare()
    assert (codes(report), report.settled) == ([], True)


def test_sane_history_has_no_findings(chain: Chain) -> None:
    first, second = chain.written("a", "5", "-2", "4"), chain.written("b", "7")
    chain.publish(first[0], second[0], *first[1:])
    chain.applied({"a": "7", "b": "7"})
    report = chain.compare()
    assert (codes(report), report.settled, report.records, report.missing_versions) == ([], True, 4, 0)


def test_duplicates_are_counted_and_no_finding(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(*events, *events)
    chain.applied({"a": "11"})
    report = chain.compare()
    assert (codes(report), report.records, report.duplicates) == ([], 4, 2)
    assert only_comparison(report).repeated == {"a": 11}


def test_first_record_of_an_id_does_not_depend_on_reading_order(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    other = replace(chain.event("b", 1), event_id=events[1].event_id)
    at = chain.offsets[STOCK_TOPIC]
    at[0] = 3
    chain.publish(other)  # of another kind, so it is read before
    at[0] = 0
    chain.publish(*events)
    at[0] = 4
    chain.applied({"a": "18"})
    report = chain.compare()
    assert (codes(report), report.duplicates, report.missing_versions) == ([], 1, 0)


def test_fractions_are_exact(chain: Chain) -> None:
    chain.publish(*chain.written("a", "0.1", "0.2"), *chain.written("b", "999999.000000001"))
    chain.applied({"a": "0.3", "b": "999999.000000002"})
    report = chain.compare()
    assert only_sink(report).drift == {"b": Decimal("0.000000001")}
    assert "0.000000001" in as_text(report)
    assert json.loads(as_text(report))["sinks"][0]["comparisons"][0]["drift_total"] == 1e-9


def test_fraction_of_an_event_in_flight_is_not_truncated(chain: Chain) -> None:
    events = chain.written("a", "0.5", "0.25")
    chain.publish(*events)
    chain.applied({"a": "0.5"}, positions={0: 1})
    assert (only_sink(chain.compare()).drift, only_sink(chain.compare()).in_flight) == ({}, 1)


# In flight, lost, parked -------------------------------------------------------------------------------------------


def test_event_behind_the_relay_is_in_flight(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(events[0])
    chain.applied({"a": "5"})
    report = chain.compare()
    assert (codes(report), report.in_flight, only_sink(report).in_flight, report.settled) == ([], 2, 2, False)


def test_skipped_event_is_lost(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(events[0], events[2])
    chain.applied({"a": "12"})
    report = chain.compare()
    assert (codes(report), report.missing_versions) == (["events-lost"], 1)
    assert report.findings[0].first == events[1].text
    assert (only_sink(report).lost, only_sink(report).drift) == (1, {})


def test_each_lost_event_counts_by_its_type(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.publish(events[0], events[3])
    chain.applied({"a": "13"})
    lost = [one.lost for topic in chain.compare().topics for one in topic.events.values()]
    assert sorted(lost)[-1] == sum(lost) == 2


def test_skipped_first_event_is_lost(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[1])
    chain.applied({"a": "6"})
    report = chain.compare()
    assert (codes(report), len(report.lost), only_sink(report).drift) == (["events-lost"], 1, {})


def test_missing_version_that_the_outbox_does_not_have_is_a_finding(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.prune(events[1])
    chain.publish(events[0], *events[2:])
    chain.applied({"a": "26"})
    report = chain.compare()
    assert (codes(report), report.findings[0].count, report.findings[0].worst) == (["versions-missing"], 1, "key a, 1")


def test_parked_event_is_no_drift(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events)
    chain.applied({"a": "12"}, letters=parked(events[1]), versions={"a": 3})
    report = chain.compare()
    assert (codes(report), only_sink(report).parked, only_sink(report).drift) == (["sink-parked"], 1, {})
    assert report.findings[0].first == events[1].text


def test_wrong_totals_are_drift_that_does_not_cancel(chain: Chain) -> None:
    chain.publish(*chain.written("a", "5"), *chain.written("b", "6"), *chain.written("c", "1"))
    chain.applied({"a": "7", "b": "3", "c": "1", "unknown": "1"})
    report = chain.compare()
    assert only_sink(report).drift == {"a": 2, "b": -3, "unknown": 1}
    (finding,) = report.findings
    assert (finding.code, finding.sink, finding.count, finding.worst) == ("sink-drift", "dedup", 3, "b -3")
    assert only_sink(report).drift_total == 6
    assert "DRIFTS by 6 in 3 keys" in describe(report)


def test_later_state_makes_up_for_a_parked_event(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events)
    chain.applied({"a": "18"}, letters=parked(events[1]), versions={"a": 3}, takes_states=True)
    assert only_sink(chain.compare()).drift == {}


def test_events_up_to_the_base_version_are_applied(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.publish(*events[:2])
    chain.applied({"a": "18"}, positions={0: 1}, bases={"a": 3}, letters=parked(events[0]))
    sink = only_sink(chain.compare())
    assert (sink.in_flight, sink.parked, sink.drift) == (1, 0, {})


def test_event_dropped_by_the_topic_is_applied(chain: Chain) -> None:
    old, quiet = chain.written("a", "5", "6"), chain.written("b", "7")
    chain.logs.ends[STOCK_NUMBER].is_whole = False
    chain.publish(old[1])
    chain.applied({"a": "11", "b": "7"}, versions={"a": 2, "b": 1})
    report = chain.compare()
    assert (codes(report), report.in_flight, only_sink(report).in_flight, quiet != old) == ([], 0, 0, True)


def test_dropped_event_is_not_in_flight_if_no_sink_has_versions(chain: Chain) -> None:
    quiet = chain.written("b", "7", at_ms=NOW_MS - LATE_MS - 1)
    chain.publish(*chain.written("a", "5"))
    end = chain.logs.ends[STOCK_NUMBER]
    end.is_whole, end.dropped_until_ms = False, NOW_MS - LATE_MS
    chain.applied({"a": "5", "b": "7"}, not_compared="no file says what to compare")
    report = chain.compare()
    assert (codes(report), report.in_flight, report.settled, len(quiet)) == ([], 0, True, 1)


# Records that break the contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [10**30, "5", None, True], ids=str)
def test_malformed_foreign_record_counts_nowhere(chain: Chain, change: object) -> None:
    events = chain.written("a", "5")
    chain.publish(*events)
    foreign = chain.event("a", 999_999_943, at_ms=NOW_MS + MINUTE_MS)
    chain.publish(foreign, change=change)
    chain.applied({"a": "5"}, letters=invalid(foreign, TopicOffset(0, 1)))
    report = chain.compare()
    assert codes(report) == ["malformed-records"]
    malformed = report.topic(STOCK_TOPIC).malformed
    assert (malformed.count, dict(malformed.reasons)) == (1, {"schema violation": 1})
    assert malformed.first.startswith("partition 0, offset 1: ")
    assert (report.missing_versions, report.in_flight, only_sink(report).drift) == (0, 0, {})


def test_a_malformed_event_is_neither_lost_nor_a_gap_nor_drift(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(events[0])
    chain.publish(events[1], change=10**30)
    chain.publish(events[2])
    place = TopicOffset(0, 1)
    chain.applied({"a": "12"}, letters=invalid(events[1], place))
    report = chain.compare()
    assert codes(report) == ["malformed-records", "sink-parked"]
    assert (report.lost, report.missing_versions, report.in_flight) == ([], 0, 0)
    assert (only_sink(report).drift, only_comparison(report).uncertain) == ({}, {"a"})


def test_malformed_record_explains_one_missing_version(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.prune(events[1], events[2])
    chain.publish(events[0])
    chain.publish(events[1], change=10**30)
    chain.publish(events[3])
    chain.applied({"a": "26"})
    report = chain.compare()
    assert (codes(report), report.missing_versions) == (["malformed-records", "versions-missing"], 1)


def test_key_of_a_discarded_malformed_event_is_compared_again(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[0])
    chain.publish(events[1], change="six")
    chain.applied({"a": "5"})
    assert only_sink(chain.compare()).drift == {"a": -6}


def test_malformed_record_that_repeats_an_applied_id_does_not_park_it(chain: Chain) -> None:
    events = chain.written("a", "5")
    chain.publish(*events)
    place = chain.record(events[0].event_id, "a", b"{")
    chain.applied({"a": "5"}, letters=invalid(events[0], place))
    report = chain.compare()
    assert (codes(report), only_sink(report).parked) == (["malformed-records"], 0)


def test_topic_without_a_valid_event_is_never_a_pass(chain: Chain) -> None:
    for event in chain.written("a", *["1"] * 282):
        chain.record(event.event_id, "a", b'{"item": "a", "number": 1}')
    chain.applied({"a": "282"})
    report = chain.compare()
    assert codes(report) == ["nothing-compared", "malformed-records"]
    assert (report.topic(STOCK_TOPIC).malformed.count, report.lost, report.in_flight) == (282, [], 0)


# Foreign and pruned events -----------------------------------------------------------------------------------------


def test_event_younger_than_the_outbox_behind_it_is_foreign(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[0])
    foreign = chain.event("stranger", 1, "100", at_ms=NOW_MS + MINUTE_MS)
    chain.publish(foreign, events[1])
    chain.applied({"a": "11", "stranger": "100"})
    report = chain.compare()
    assert codes(report) == ["foreign-events", "sink-drift"]
    of_topic = report.topic(STOCK_TOPIC)
    assert (of_topic.foreign.count, report.pruned) == (1, 0)
    assert of_topic.foreign.first == f"{foreign.text} at partition 0, offset 1, key stranger"
    assert only_sink(report).drift == {"stranger": 100}


def test_event_beyond_the_version_of_its_key_is_foreign(chain: Chain) -> None:
    chain.prune(*chain.written("a", "5"))
    foreign = chain.event("a", 1_000, "9")
    chain.publish(foreign)
    chain.applied({"a": "5"}, letters=parked(foreign))
    report = chain.compare()
    assert codes(report) == ["foreign-events", "sink-parked"]
    of_topic = report.topic(STOCK_TOPIC)
    assert (of_topic.foreign.worst, only_sink(report).drift) == (of_topic.foreign.first, {})


def test_foreign_version_makes_no_gap_and_loses_nothing(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[0])
    chain.publish(chain.event("a", 999_999_943, "1"))
    chain.applied({"a": "6"})
    report = chain.compare()
    assert codes(report) == ["foreign-events", "sink-drift"]
    assert (report.missing_versions, report.lost, report.in_flight) == (0, [], 1)


def test_foreign_event_in_flight_is_no_drift(chain: Chain) -> None:
    events = chain.written("a", "5")
    chain.publish(*events, chain.event("a", 2, "9"))
    chain.applied({"a": "5"}, positions={0: 1})
    report = chain.compare()
    assert (codes(report), only_sink(report).in_flight, only_sink(report).drift) == (["foreign-events"], 1, {})


def test_events_older_than_the_outbox_are_pruned(chain: Chain) -> None:
    old = chain.written("a", "5", "6", at_ms=NOW_MS - MINUTE_MS)
    young = chain.written("b", "7")
    chain.publish(*old, *young)
    chain.prune(*old)
    chain.applied({"a": "11", "b": "7"})
    report = chain.compare()
    assert (codes(report), report.pruned, report.topic(STOCK_TOPIC).foreign.count) == ([], 2, 0)


def test_empty_outbox_was_pruned(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    chain.prune(*events)
    chain.applied({"a": "5"})
    report = chain.compare()
    assert (codes(report), report.pruned) == (["sink-drift"], 2)
    assert only_sink(report).drift == {"a": -6}


def test_pruned_event_that_the_sink_has_not_read_is_in_flight(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events, events[1])
    chain.prune(*events[:2])
    chain.applied({"a": "5"}, positions={0: 1})
    report = chain.compare()
    assert (codes(report), report.pruned, only_sink(report).in_flight, only_sink(report).drift) == ([], 2, 2, {})


def test_a_late_commit_makes_no_pruned_event_foreign(chain: Chain) -> None:
    """Its row is older and stays, but it stands behind the pruned event: it was committed after prune looked."""
    (late,) = chain.written("a", "5", at_ms=NOW_MS - MINUTE_MS)
    (pruned,) = chain.written("b", "6")
    chain.publish(pruned, late)
    chain.prune(pruned)
    chain.applied({"a": "5", "b": "6"})
    report = chain.compare()
    assert (codes(report), report.pruned) == ([], 1)


def test_old_event_that_was_relayed_late_is_pruned(chain: Chain) -> None:
    (pruned,) = chain.written("a", "5", at_ms=NOW_MS - MINUTE_MS)
    (young,) = chain.written("b", "6")
    chain.publish(young, pruned)
    chain.prune(pruned)
    chain.applied({"a": "5", "b": "6"})
    report = chain.compare()
    assert (codes(report), report.pruned) == ([], 1)


def test_a_lost_event_sent_again_makes_no_pruned_event_foreign(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", at_ms=NOW_MS - MINUTE_MS)
    later = [chain.event("a", 4, "8")]
    chain.publish(events[0], events[2], *later, events[1])
    chain.prune(events[0], events[2])
    assert chain.versions is not None
    chain.versions[STOCK_TOPIC]["a"], chain.totals["a"] = 4, Decimal(26)
    chain.applied({"a": "26"})
    report = chain.compare()
    assert (codes(report), report.pruned) == ([], 3)


# Less declared -----------------------------------------------------------------------------------------------------


def test_without_a_version_a_lost_event_is_recognised_by_its_age(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(has_version=False)
    lost = chain.written("a", "5", at_ms=NOW_MS - LATE_MS - 1)
    young = chain.written("b", "6", at_ms=NOW_MS - LATE_MS + 1)
    chain.publish(*chain.written("c", "7"))
    chain.versions = None
    chain.applied({"c": "7"})
    report = chain.compare()
    assert (codes(report), report.lost) == (["events-lost"], [lost[0].text])
    assert (report.in_flight, report.missing_versions, len(young)) == (1, 0, 1)
    assert (only_sink(report).lost, only_sink(report).in_flight, only_sink(report).drift) == (1, 1, {})


def test_without_a_version_no_gap_is_looked_for(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(has_version=False)
    events = chain.written("a", "5", "6")
    chain.publish(events[0], serial=1)
    chain.publish(events[1], serial=9)
    chain.applied({"a": "11"})
    report = chain.compare()
    assert (codes(report), report.missing_versions) == ([], 0)


def test_possibly_dropped_event_without_version_is_not_lost(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(has_version=False)
    chain.written("a", "5", at_ms=NOW_MS - LATE_MS - 1)
    chain.publish(*chain.written("c", "7"))
    end = chain.logs.ends[STOCK_NUMBER]
    end.is_whole, end.dropped_until_ms = False, NOW_MS - LATE_MS
    chain.applied({"a": "5", "c": "7"})
    report = chain.compare()
    assert (codes(report), report.in_flight, report.settled) == ([], 0, True)


def test_without_a_comparison_only_events_are_compared(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(comparisons=())
    events = chain.written("a", "0", "0", "0")
    chain.publish(events[0], events[2])
    chain.applied({"a": "1000"}, not_compared="no file says what to compare")
    report = chain.compare()
    assert (codes(report), only_sink(report).drift) == (["events-lost"], {})
    assert "not compared" in describe(report)


def test_without_source_versions_no_event_is_foreign_by_version(chain: Chain) -> None:
    chain.versions = None
    chain.prune(*chain.written("a", "5"))
    chain.publish(chain.event("a", 1_000, "9"))
    chain.applied({"a": "5"})
    report = chain.compare()
    assert (codes(report), report.pruned) == ([], 1)


# Several events and topics -----------------------------------------------------------------------------------------


def test_topics_are_compared_each_by_itself(chain_of: Callable[..., Chain]) -> None:
    """The same key and versions on two topics are different events of different keys."""
    chain = chain_of(names=("stock", "order"))
    stock = chain.written("a", "5", "6", "7")
    placed = [chain.event("a", version, "1", event="order/placed.v2") for version in (1, 2, 3)]
    chain.outbox += placed
    assert chain.versions is not None
    chain.versions["chain.order"]["a"], chain.totals["a"] = 3, Decimal(21)
    chain.publish(stock[0], stock[2], *placed, placed[0])
    chain.applied({"a": "15"})
    report = chain.compare()
    assert codes(report) == ["events-lost"]
    assert (report.findings[0].topic, report.findings[0].first) == (STOCK_TOPIC, stock[1].text)
    assert [(topic.name, topic.records, topic.duplicates, len(topic.lost)) for topic in report.topics] == [
        ("chain.order", 4, 1, 0),
        (STOCK_TOPIC, 2, 0, 1),
    ]
    assert (report.records, report.outbox_events, only_sink(report).lost) == (6, 6, 1)
    assert only_sink(report).drift == {}
    assert only_comparison(report).repeated == {"a": 1}


def test_events_are_counted_by_name(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    named = chain.event("a", 3, "0", event="stock/named.v1")
    chain.outbox.append(named)
    assert chain.versions is not None
    chain.versions[STOCK_TOPIC]["a"] = 3
    chain.publish(events[0], events[0])
    chain.applied({"a": "5"})
    report = chain.compare()
    found = {name: (one.delivered, one.duplicates, one.in_flight) for name, one in report.topics[1].events.items()}
    assert found == {"stock.changed": (2, 1, 1), "stock.named": (0, 0, 1)}


def test_events_that_a_sink_has_not_asked_for_are_not_missing_to_it(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(names=("stock.named",))
    events = [*chain.written("a", "5", "6"), chain.event("a", 3, "0", event="stock/named.v1")]
    chain.outbox.append(events[-1])
    chain.publish(*events)
    chain.applied({"a": "11"}, positions={0: 0}, letters=parked(events[0]))
    sink = only_sink(chain.compare())
    assert (sink.in_flight, sink.parked, sink.drift) == (1, 0, {})


def test_a_sink_that_asks_for_one_version_lacks_only_that(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(names=("order.placed.v2",))
    chain.written("a", "12", event="order/placed.v1")
    chain.written("b", "7", event="order/placed.v2")
    assert only_sink(chain.compare()).in_flight == 1


def test_an_old_version_in_flight_adds_what_its_upcaster_says(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(names=("order",))
    chain.publish(*chain.written("a", "36", event="order/placed.v1"))
    chain.applied({}, positions={"chain.order": {}})
    report = chain.compare()
    assert (codes(report), only_sink(report).in_flight) == ([], 1)


@pytest.mark.parametrize(
    ("version", "payload", "expected"),
    [
        (1, '{"item": "a", "serial": 1, "dozens": 3}', (36,)),
        (1, '{"item": "a", "serial": 1}', (None,)),
        (2, None, (7,)),
    ],
)
def test_numbers_of_the_outbox_are_those_of_the_newest_version(
    chain_of: Callable[..., Chain], version: int, payload: str | None, expected: tuple[object, ...]
) -> None:
    declared = chain_of(names=("order",)).declared
    (kind,) = (kind for kind in declared.kinds if kind.row == ("order", "placed", version))
    numbers = Numbers(next(topic for topic in declared.topics if topic.name == kind.topic), kind)
    assert numbers.of({"change": "7"}, payload) == expected


def test_an_upcast_event_makes_a_sink_of_the_old_version_uncertain(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(names=("order.placed.v1",))
    chain.publish(*chain.written("a", "36", event="order/placed.v1"))
    chain.applied({}, positions={"chain.order": {}})
    report = chain.compare()
    assert (codes(report), only_comparison(report).uncertain) == ([], {"a"})


@pytest.mark.parametrize(("type_", "version"), [("unheard", "1"), ("changed", "9")])
def test_an_undeclared_event_breaks_the_contract(chain: Chain, type_: str, version: str) -> None:
    event = chain.event("a", 1)
    chain.record(event.event_id, "a", b"{}", event=f"stock/{type_}.v{version}")
    chain.publish(*chain.written("b", "1"))
    chain.applied({"b": "1"})
    assert codes(chain.compare()) == ["malformed-records"]


# Repeated versions -------------------------------------------------------------------------------------------------


def test_two_events_with_one_version_are_a_finding(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    twin = chain.event("a", 2, "6")
    chain.outbox.append(twin)
    chain.publish(*events, twin, events[0])
    chain.totals["a"] = Decimal(24)
    chain.applied({"a": "24"})
    report = chain.compare()
    assert (codes(report), report.findings[0].count) == (["versions-repeated"], 1)
    assert report.findings[0].first == f"key a, version 2: {events[1].text} and {twin.text}"


def test_a_repeated_version_does_not_hide_a_missing_one(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.prune(*events)
    chain.publish(events[0], events[1], chain.event("a", 2), events[3])
    chain.applied({"a": "26"})
    report = chain.compare()
    assert codes(report) == ["versions-missing", "versions-repeated"]
    assert (report.missing_versions, report.topic(STOCK_TOPIC).repeated_versions) == (1, 1)


# Keys on several partitions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_version", [True, False])
def test_a_key_on_two_partitions_is_a_finding(tmp_path: Path, has_version: bool) -> None:
    chain = Chain(declare(tmp_path, has_version=has_version))
    with closing(chain.logs):
        events, others = chain.written("a", "5", "6"), chain.written("b", "7", "8")
        chain.publish(events[0], *others)
        chain.publish(events[1], partition=1)
        chain.applied({"a": "11", "b": "15"})
        report = chain.compare()
    assert (codes(report), report.findings[0].count) == (["keys-spread"], 1)
    assert report.findings[0].first == "key a, partitions 0, 1"
    assert "1 key with events on several partitions" in describe(report)


def test_a_duplicate_on_another_partition_is_a_finding_too(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    chain.publish(events[0], partition=1)
    chain.applied({"a": "11"})
    assert codes(chain.compare()) == ["keys-spread"]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7))  # eight can have the sums of 1 to 8: 1 1 4 5 5 6 6 8
def test_sums_of_versions_see_what_is_missing_or_repeated(numbers: list[int]) -> None:
    found: dict[str, Versions] = {}
    for number in numbers:
        versions.add(found, "a", number)
    assert found["a"].is_complete is (sorted(numbers) == list(range(min(numbers), max(numbers) + 1)))


# Discarded dead letters ---------------------------------------------------------------------------------------------


def discarded(event: Made) -> dict[bytes, Letter]:
    """The dead letter of a valid event that was discarded."""
    return {event.event_id: letter(event)._replace(is_open=False)}


def test_a_discarded_event_is_due_no_more(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events)
    chain.applied({"a": "12"}, letters=discarded(events[1]), discarded={"test data": 1})
    report = chain.compare()
    assert (codes(report), report.settled, only_sink(report).parked) == ([], True, 0)
    assert report.acknowledged == [{"sink": SINK, "count": 1, "reasons": {"test data": 1}}]
    assert "1 discarded: test data (1)" in describe(report)
    assert json.loads(as_text(report))["acknowledged"][0]["reasons"] == {"test data": 1}


def test_a_discarded_event_that_is_left_nowhere_else_is_due_no_more(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events[2:])
    chain.prune(*events[:2])
    chain.logs.ends[STOCK_NUMBER].is_whole = False
    chain.applied({"a": "12"}, letters=discarded(events[1]), versions={"a": 3})
    assert codes(chain.compare()) == []
    chain.applied({"a": "13"}, letters=discarded(events[1]), versions={"a": 3})
    assert only_sink(chain.compare()).drift == {"a": 1}


def test_a_discarded_event_that_was_applied_by_a_sink_is_drift(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    chain.applied({"a": "11"}, letters=discarded(events[1]))
    assert only_sink(chain.compare()).drift == {"a": 6}


def test_a_foreign_event_that_was_discarded_is_not_subtracted(chain: Chain) -> None:
    events = chain.written("a", "5")
    foreign = chain.event("a", 1_000, "9")
    chain.publish(*events, foreign)
    chain.applied({"a": "5"}, letters=discarded(foreign))
    report = chain.compare()
    assert (codes(report), only_sink(report).drift) == (["foreign-events"], {})


def test_a_discarded_event_is_not_due_from_the_other_sinks_either_way(chain: Chain) -> None:
    """It was on the topic, which has dropped it: a sink without the letter has applied it."""
    events = chain.written("a", "5", "6")
    chain.publish(events[0])
    chain.acknowledged = {events[1].event_id}
    chain.applied({"a": "11"})
    report = chain.compare()
    assert (codes(report), report.in_flight, only_sink(report).in_flight) == ([], 0, 0)


def test_a_discarded_invalid_record_is_no_finding(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    foreign = chain.event("a", 999_999_943)
    chain.publish(foreign, change="6")
    anonymous = chain.record(None, "a", b"{")
    assert codes(chain.compare()) == ["malformed-records"]
    record = Record(b"a", [("eventType", b"changed"), ("schemaVersion", b"1")], b"{", NOW_MS)
    chain.acknowledged = {foreign.event_id, identity_bytes(identity(record, None))}
    chain.applied({"a": "11"}, letters=invalid(foreign, TopicOffset(0, 2), is_open=False))
    report = chain.compare()
    assert (codes(report), anonymous.offset) == ([], 3)
    assert (report.topic(STOCK_TOPIC).malformed.acknowledged, only_comparison(report).uncertain) == (2, set())


@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_discarded_invalid_event_explains_a_difference_of_its_key(chain: Chain, is_pruned: bool) -> None:
    events, others = chain.written("a", "5", "6"), chain.written("b", "7")
    chain.publish(events[0], *others)
    chain.publish(events[1], change="six")
    if is_pruned:
        chain.prune(*events)
    chain.acknowledged = {events[1].event_id}
    chain.applied({"a": "5", "b": "8"}, letters=invalid(events[1], TopicOffset(0, 2), is_open=False))
    report = chain.compare()
    assert (codes(report), only_sink(report).drift) == (["sink-drift"], {"b": Decimal(1)})
    assert (only_comparison(report).uncertain, report.in_flight) == ({"a"}, 0)


@pytest.mark.parametrize("has_id", [True, False])
def test_an_invalid_record_that_only_its_open_letter_has_is_set_aside(chain: Chain, has_id: bool) -> None:
    events, others = chain.written("a", "5", "6"), chain.written("b", "7")
    chain.prune(*events)
    chain.publish(events[0], *others)
    letters = invalid(events[1], TopicOffset(0, 2))
    if not has_id:
        letters = {bytes(32): letters[events[1].event_id]}
    chain.applied({"a": "5", "b": "7"}, letters=letters)
    report = chain.compare()
    assert (codes(report), only_sink(report).parked, only_sink(report).drift) == (["sink-parked"], 1, {})
    assert report.findings[0].first == (events[1].text if has_id else f"sha256:{bytes(32).hex()}")
    assert only_comparison(report).uncertain == {"a"}, "nobody knows what it adds"


def test_an_open_letter_of_an_invalid_record_is_set_aside_though_the_event_of_its_id_is_part_of_the_base(
    chain: Chain,
) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[0])
    chain.applied({"a": "11"}, positions={0: 1}, bases={"a": 2}, letters=invalid(events[1], TopicOffset(0, 7)))
    report = chain.compare()
    assert (codes(report), only_sink(report).parked) == (["sink-parked"], 1)
    assert (only_sink(report).drift, only_comparison(report).uncertain) == ({}, set()), "the base has what it adds"


def test_a_letter_whose_invalid_record_is_on_the_topic_is_no_second_finding(chain: Chain) -> None:
    chain.publish(*chain.written("a", "5"))
    place = chain.record(None, "a", b"{")
    record = Record(b"a", [("eventType", b"changed"), ("schemaVersion", b"1")], b"{", NOW_MS)
    anonymous = Letter(STOCK_TOPIC, "a", place=place, is_event=False)
    chain.applied({"a": "5"}, letters={identity_bytes(identity(record, None)): anonymous})
    assert codes(chain.compare()) == ["malformed-records"]


def test_a_valid_event_behind_a_discarded_record_with_its_id_is_due(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    place = chain.record(events[1].event_id, "a", b"{")
    chain.publish(*events)
    chain.acknowledged = {events[1].event_id}
    chain.applied({"a": "11"}, letters=invalid(events[1], place, is_open=False))
    assert codes(chain.compare()) == []


# Comparisons -------------------------------------------------------------------------------------------------------


def test_each_comparison_is_reported(chain_of: Callable[..., Chain]) -> None:
    count = Comparison(Path("count.sql"), (AddsLine(1, None, frozenset({"stock.changed"})),), "")
    chain = chain_of(comparisons=(STOCK, count))
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    source = chain.source(chain.outbox)
    source.totals = {STOCK.id: Totals({"a": Decimal(11)}), count.id: Totals({"a": Decimal(2)})}
    chain.applied({}, positions={0: 1})
    chain.sink = replace(chain.sink, totals={STOCK.id: Totals({"a": Decimal(5)}), count.id: Totals({"a": Decimal(2)})})
    chain.read()
    report = compare(Observed(chain.declared, Sinks([chain.sink]), chain.logs, source), lambda _: None)
    assert [(one.name, one.drift) for one in only_sink(report).comparisons] == [
        ("stock", {}),
        ("count", {"a": Decimal(1)}),
    ]
    (finding,) = report.findings
    assert (finding.code, finding.sink, finding.comparison) == ("sink-drift", SINK, "count")


def test_what_an_event_takes_away_is_added_back(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(
        comparisons=(Comparison(Path("left.sql"), (AddsLine(-1, "change", frozenset({"stock.changed"})),), ""),)
    )
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    chain.totals["a"] = Decimal(-11)
    chain.applied({"a": "-5"}, positions={0: 1})
    assert (only_sink(chain.compare()).drift, only_sink(chain.compare()).in_flight) == ({}, 1)


def test_without_adds_totals_are_compared_when_nothing_is_in_flight(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(comparisons=(Comparison(Path("state.sql"), (), ""),))
    events = chain.written("a", "5", "6")
    chain.publish(*events)
    chain.applied({"a": "5"}, positions={0: 1})
    report = chain.compare()
    assert (codes(report), only_comparison(report).not_compared.startswith("not now: 1 in flight")) == ([], True)
    chain.applied({"a": "5"})
    assert only_sink(chain.compare()).drift == {"a": -6}


def test_without_adds_a_set_aside_event_makes_its_key_uncertain(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(comparisons=(Comparison(Path("state.sql"), (), ""),))
    events, others = chain.written("a", "5", "6"), chain.written("b", "1")
    chain.publish(*events, *others)
    chain.applied({"a": "5", "b": "2"}, letters=parked(events[1]))
    report = chain.compare()
    assert (only_sink(report).drift, only_comparison(report).uncertain) == ({"b": Decimal(1)}, {"a"})


# Sinks of states ---------------------------------------------------------------------------------------------------


def test_state_of_the_same_version_has_the_same_total(chain: Chain) -> None:
    source = Totals({"a": Decimal(5), "b": Decimal(6), "c": Decimal(0)}, {"a": 2, "b": 4, "c": 0}, has_version=True)
    held = Totals({"a": Decimal(7), "b": Decimal(1), "gone": Decimal(9)}, {"a": 2, "b": 1, "gone": 1}, has_version=True)
    report = compare_states(
        chain.declared, Source(totals={STOCK.id: source}), SinkState(SINK, totals={STOCK.id: held}, carries="states")
    )
    assert report.drift == {"a": 2, "gone": 9}
    assert report.in_flight == 3 + 1


def test_states_without_versions_are_not_compared(chain: Chain) -> None:
    source = Source(totals={STOCK.id: Totals({"a": Decimal(5)})})
    state = SinkState(SINK, totals={STOCK.id: Totals(has_version=True)}, carries="states")
    report = compare_states(chain.declared, source, state)
    assert (report.drift, bool(report.comparisons[0].not_compared)) == ({}, True)


# At size -----------------------------------------------------------------------------------------------------------


def peak_bytes(chain: Chain, events: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The memory that comparing so many events of ten keys takes, half of them pruned."""
    monkeypatch.setattr(buckets, "PACKED_ROWS", 500)
    monkeypatch.setattr(buckets, "MEMORY_MAX_BYTES", 50_000)
    written = (chain.event(f"key {number % 10}", 1 + number // 10) for number in range(events))
    value = b'{"item": "%s", "change": 1, "serial": %d}'
    tracemalloc.start()
    try:
        with closing(Buckets(Written, bytes(16))) as outbox:
            for number, event in enumerate(written):
                chain.record(event.event_id, event.row.key, value % (event.row.key.encode(), event.row.version))
                if number % 2:
                    outbox.add(event.event_id, event.row)
            chain.read()
            rows = (entry for bucket in range(buckets.COUNT) for entry in outbox.rows(bucket))
            report = compare(Observed(chain.declared, Sinks(), chain.logs, Source(rows)), lambda _: None)
        assert (report.outbox_events, report.pruned, codes(report)) == (events // 2, events // 2, [])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place_of_rows", ["in files"], indirect=True)
def test_memory_does_not_grow_with_the_number_of_events(
    chain_of: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (peak_bytes(chain_of(), events, monkeypatch) for events in (2_000, 8_000))
    assert many < 1.5 * few
