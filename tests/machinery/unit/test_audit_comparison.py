"""The comparison of `outbox check` on histories written by hand: empty, sane, and each kind of wrong. No JVM."""

from __future__ import annotations

import json
import tracemalloc
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outbox.audit import buckets
from outbox.audit.buckets import Buckets
from outbox.audit.comparison import compare, compare_states
from outbox.audit.sinks import SinkState
from outbox.audit.source import LATE_MS, Source, Written
from outbox.audit.topic_part import TopicOffset
from outbox.commands.check import as_text, describe
from outbox.sink.records import EventDecoder
from tests.support.audit_chain import MINUTE_MS, NOW_MS, Chain, codes, only_sink, schema


@pytest.fixture(autouse=True, params=["in memory", "in files"])
def place_of_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the comparison keeps its rows: it finds the same."""
    if request.param == "in files":
        monkeypatch.setattr(buckets, "PACKED_ROWS", 2)
        monkeypatch.setattr(buckets, "MEMORY_MAX_BYTES", 100)


@pytest.fixture
def chain_of(tmp_path: Path) -> Iterator[Callable[..., Chain]]:
    """Makes a chain whose events have the named properties."""
    with ExitStack() as logs:

        def make(**properties: Any) -> Chain:
            chain = Chain(EventDecoder(schema(tmp_path), key="item", **properties))
            logs.enter_context(closing(chain.log))
            return chain

        yield make


@pytest.fixture
def chain(chain_of: Callable[..., Chain]) -> Chain:
    return chain_of(version="serial", quantity="change")


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
    assert report.repeated == {"a": 11}


def test_fractions_are_exact(chain: Chain) -> None:
    chain.publish(*chain.written("a", "0.1", "0.2"), *chain.written("b", "999999.000000001"))
    chain.applied({"a": "0.3", "b": "999999.000000002"})
    report = chain.compare()
    assert only_sink(report).drift == {"b": Decimal("0.000000001")}
    assert "0.000000001" in as_text(report)
    assert json.loads(as_text(report))["sinks"][0]["drift_total"] == 1e-9


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
    assert report.findings[0].first == str(uuid.UUID(bytes=events[1].event_id))
    assert (only_sink(report).lost, only_sink(report).drift) == (1, {})


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
    chain.applied({"a": "12"}, parked={events[1].event_id: None}, versions={"a": 3})
    report = chain.compare()
    assert (codes(report), only_sink(report).parked, only_sink(report).drift) == (["sink-parked"], 1, {})
    assert report.findings[0].first == str(uuid.UUID(bytes=events[1].event_id))


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
    chain.applied({"a": "18"}, parked={events[1].event_id: None}, versions={"a": 3}, takes_states=True)
    assert only_sink(chain.compare()).drift == {}


def test_events_up_to_the_base_version_are_applied(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.publish(*events[:2])
    chain.applied({"a": "18"}, positions={0: 1}, bases={"a": 3}, parked={events[0].event_id: None})
    sink = only_sink(chain.compare())
    assert (sink.in_flight, sink.parked, sink.drift) == (1, 0, {})


def test_event_dropped_by_the_topic_is_applied(chain: Chain) -> None:
    old, quiet = chain.written("a", "5", "6"), chain.written("b", "7")
    chain.log.is_whole = False
    chain.publish(old[1])
    chain.applied({"a": "11", "b": "7"}, versions={"a": 2, "b": 1})
    report = chain.compare()
    assert (codes(report), report.in_flight, only_sink(report).in_flight, quiet != old) == ([], 0, 0, True)


# Records that break the contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [10**30, "5", None, True], ids=str)
def test_malformed_foreign_record_counts_nowhere(chain: Chain, change: object) -> None:
    events = chain.written("a", "5")
    chain.publish(*events)
    foreign = chain.event("a", 999_999_943, at_ms=NOW_MS + MINUTE_MS)
    chain.publish(foreign, change=change)
    chain.applied({"a": "5"}, parked={foreign.event_id: TopicOffset(0, 1)})
    report = chain.compare()
    assert codes(report) == ["malformed-records"]
    assert (report.malformed.count, dict(report.malformed.reasons)) == (1, {"schema violation": 1})
    assert report.malformed.first.startswith("partition 0, offset 1: ")
    assert (report.missing_versions, report.in_flight, only_sink(report).drift) == (0, 0, {})


def test_malformed_event_of_the_outbox_is_neither_lost_nor_a_gap_nor_drift(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(events[0])
    chain.publish(events[1], change=10**30)
    chain.publish(events[2])
    place = TopicOffset(0, 1)
    chain.applied({"a": "12"}, parked={events[1].event_id: place})
    report = chain.compare()
    assert codes(report) == ["malformed-records", "sink-parked"]
    assert (report.lost, report.missing_versions, report.in_flight) == ([], 0, 0)
    assert (only_sink(report).drift, only_sink(report).uncertain) == ({}, {"a"})


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
    chain.applied({"a": "5"}, parked={events[0].event_id: place})
    report = chain.compare()
    assert (codes(report), only_sink(report).parked) == (["malformed-records"], 0)


def test_topic_without_a_valid_event_is_never_a_pass(chain: Chain) -> None:
    for event in chain.written("a", *["1"] * 282):
        chain.record(event.event_id, "a", b'{"item": "a", "number": 1}')
    chain.applied({"a": "282"})
    report = chain.compare()
    assert codes(report) == ["nothing-compared", "malformed-records"]
    assert (report.malformed.count, report.lost, report.in_flight) == (282, [], 0)


# Foreign and pruned events -----------------------------------------------------------------------------------------


def test_event_younger_than_the_outbox_behind_it_is_foreign(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[0])
    foreign = chain.event("stranger", 1, "100", at_ms=NOW_MS + MINUTE_MS)
    chain.publish(foreign, events[1])
    chain.applied({"a": "11", "stranger": "100"})
    report = chain.compare()
    assert codes(report) == ["foreign-events", "sink-drift"]
    assert (report.foreign.count, report.pruned) == (1, 0)
    assert report.foreign.first == f"{uuid.UUID(bytes=foreign.event_id)} at partition 0, offset 1, key stranger"
    assert only_sink(report).drift == {"stranger": 100}


def test_event_beyond_the_version_of_its_key_is_foreign(chain: Chain) -> None:
    chain.prune(*chain.written("a", "5"))
    foreign = chain.event("a", 1_000, "9")
    chain.publish(foreign)
    chain.applied({"a": "5"}, parked={foreign.event_id: None})
    report = chain.compare()
    assert codes(report) == ["foreign-events", "sink-parked"]
    assert (report.foreign.worst, only_sink(report).drift) == (report.foreign.first, {})


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
    assert (codes(report), report.pruned, report.foreign.count) == ([], 2, 0)


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


def test_transaction_committed_late_does_not_make_a_pruned_event_foreign(chain: Chain) -> None:
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


def test_lost_event_that_was_sent_again_does_not_make_pruned_events_foreign(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7", at_ms=NOW_MS - MINUTE_MS)
    later = [chain.event("a", 4, "8")]
    chain.publish(events[0], events[2], *later, events[1])
    chain.prune(events[0], events[2])
    assert chain.versions is not None
    assert chain.totals is not None
    chain.versions["a"], chain.totals["a"] = 4, Decimal(26)
    chain.applied({"a": "26"})
    report = chain.compare()
    assert (codes(report), report.pruned) == ([], 3)


# Less declared -----------------------------------------------------------------------------------------------------


def test_without_a_version_a_lost_event_is_recognised_by_its_age(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(quantity="change")
    lost = chain.written("a", "5", at_ms=NOW_MS - LATE_MS - 1)
    young = chain.written("b", "6", at_ms=NOW_MS - LATE_MS + 1)
    chain.publish(*chain.written("c", "7"))
    chain.versions = None
    chain.applied({"c": "7"})
    report = chain.compare()
    assert (codes(report), report.lost) == (["events-lost"], [str(uuid.UUID(bytes=lost[0].event_id))])
    assert (report.in_flight, report.missing_versions, len(young)) == (1, 0, 1)
    assert (only_sink(report).lost, only_sink(report).in_flight, only_sink(report).drift) == (1, 1, {})


def test_without_a_version_no_gap_is_looked_for(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(quantity="change")
    events = chain.written("a", "5", "6")
    chain.publish(events[0], serial=1)
    chain.publish(events[1], serial=9)
    chain.applied({"a": "11"})
    report = chain.compare()
    assert (codes(report), report.missing_versions) == ([], 0)


def test_without_a_version_what_the_topic_may_have_dropped_is_not_lost(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(quantity="change")
    chain.written("a", "5", at_ms=NOW_MS - LATE_MS - 1)
    chain.publish(*chain.written("c", "7"))
    chain.log.is_whole, chain.log.dropped_until_ms = False, NOW_MS - LATE_MS
    chain.applied({"a": "5", "c": "7"})
    report = chain.compare()
    assert (codes(report), report.in_flight, report.settled) == ([], 0, True)


def test_without_a_quantity_only_events_are_compared(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(version="serial")
    events = chain.written("a", "0", "0", "0")
    chain.publish(events[0], events[2])
    chain.applied({"a": "1000"}, not_compared="its events have no quantity")
    report = chain.compare()
    assert (codes(report), only_sink(report).drift) == (["events-lost"], {})
    assert "not compared" in describe(report)


def test_without_source_totals_only_events_are_compared(chain: Chain) -> None:
    chain.totals = chain.versions = None
    events = chain.written("a", "5", "6", "7")
    chain.publish(events[0], events[2])
    chain.applied({"a": "1000"})
    report = chain.compare()
    assert (codes(report), only_sink(report).drift) == (["events-lost"], {})
    assert only_sink(report).not_compared


# Sinks of states ---------------------------------------------------------------------------------------------------


def test_state_of_the_same_version_has_the_same_total() -> None:
    source = Source((), {"a": Decimal(5), "b": Decimal(6), "c": Decimal(0)}, {"a": 2, "b": 4, "c": 0})
    states = SinkState(
        "changes",
        totals={"a": Decimal(7), "b": Decimal(1), "gone": Decimal(9)},
        versions={"a": 2, "b": 1, "gone": 1},
        carries="states",
    )
    (report,) = compare_states(source, [states])
    assert report.drift == {"a": 2, "gone": 9}
    assert report.in_flight == 3 + 1


def test_states_without_versions_are_not_compared() -> None:
    (report,) = compare_states(Source((), {"a": Decimal(5)}, None), [SinkState("changes", carries="states")])
    assert (report.drift, bool(report.not_compared)) == ({}, True)


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
                chain.record(event.event_id, event.key, value % (event.key.encode(), event.version))
                if number % 2:
                    outbox.add(event.event_id, event)
            chain.read()
            rows = (row for bucket in range(buckets.COUNT) for _, row in outbox.rows(bucket))
            report = compare(Source(rows, None, None), chain.log, [], lambda _: None, topic="events")
        assert (report.outbox_events, report.pruned, codes(report)) == (events // 2, events // 2, [])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("place_of_rows", ["in files"], indirect=True)
def test_memory_does_not_grow_with_the_number_of_events(
    chain_of: Callable[..., Chain], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        peak_bytes(chain_of(version="serial", quantity="change"), events, monkeypatch) for events in (2_000, 8_000)
    )
    assert many < 1.5 * few
