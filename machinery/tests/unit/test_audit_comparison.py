"""The comparison of `outbox check` on histories written by hand: empty, sane, and each kind of wrong; the files that
say what is compared; and the tables that are joined. No JVM.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outbox.audit import comparison, store
from outbox.audit.comparison import Observed, compare, compare_states
from outbox.audit.declared import Addend
from outbox.audit.rows import SINK as SINK_ROWS
from outbox.audit.rows import SOURCE, load_rows
from outbox.audit.sinks import Sinks, SinkState, TopicOffset
from outbox.audit.source import LATE_MS, Source, Written
from outbox.audit.store import Store, TopicLogs
from outbox.sink import comparison_files
from outbox.sink.comparison_files import AddsLine, Comparison
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.failures import raises
from tests.support.audit_chain import (
    MINUTE_MS,
    NOW_MS,
    SINK,
    STOCK,
    STOCK_TOPIC,
    Chain,
    codes,
    declare,
    invalid,
    letter,
    only_comparison,
    only_sink,
)


@pytest.fixture
def chain_of(tmp_path: Path) -> Callable[..., Chain]:
    """Makes a chain that is declared like this."""
    return lambda **options: Chain(declare(tmp_path, **options))


@pytest.fixture
def chain(chain_of: Callable[..., Chain]) -> Chain:
    return chain_of()


# Sane --------------------------------------------------------------------------------------------------------------


def test_empty_and_sane_histories_have_no_findings(chain: Chain) -> None:
    chain.expect(settled=True)
    first, second = chain.written("a", "5", "-2", "4"), chain.written("b", "7")
    chain.publish(first[0], second[0], *first[1:])
    chain.applied({"a": "7", "b": "7"})
    chain.expect(settled=True, records=4)


def test_fractions_are_exact(chain: Chain) -> None:
    events = chain.written("a", "0.5", "0.25")
    chain.publish(*chain.written("b", "999999.000000001"), *events)
    chain.applied({"a": "0.5", "b": "999999.000000002"}, positions={0: 2})
    report = chain.expect("sink-drift", drift={"b": Decimal("0.000000001")}, sink_in_flight=1)
    assert "0.000000001" in report.as_json()
    assert json.loads(report.as_json())["sinks"][0]["comparisons"][0]["drift_total"] == 1e-9


# In flight, lost, parked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("published", "total"), [((0, 2, 3), "20"), ((0, 3), "13"), ((1, 2, 3), "21")])
def test_skipped_event_is_lost(chain: Chain, published: Sequence[int], total: str) -> None:
    events = chain.written("a", "5", "6", "7", "8")
    chain.publish(*(events[number] for number in published))
    chain.applied({"a": total})
    lost = [event.event_id for number, event in enumerate(events) if number not in published]
    report = chain.expect("events-lost", lost=lost, sink_lost=len(lost), drift={})
    assert report.findings[0].first == lost[0]
    assert report.count("events-lost") == len(lost)


def test_wrong_totals_are_drift_that_does_not_cancel(chain: Chain) -> None:
    chain.publish(*chain.written("a", "5"), *chain.written("b", "6"), *chain.written("c", "1"))
    chain.applied({"a": "7", "b": "3", "c": "1", "unknown": "1"})
    report = chain.expect("sink-drift", drift={"a": 2, "b": -3, "unknown": 1})
    [finding] = report.findings
    assert (finding.sink, finding.count, finding.worst) == ("dedup", 3, "b -3")
    assert only_sink(report).drift_total == 6
    assert "drifts by 6 in 3 keys" in report.as_text()


@pytest.mark.parametrize(("total", "drift"), [("11", {}), ("13", {"a": 2})])
def test_a_target_ahead_of_the_positions_is_compared_at_its_versions(
    chain: Chain, total: str, drift: dict[str, int]
) -> None:
    chain.publish(*chain.written("a", "5", "6", "7"))
    chain.applied({"a": total}, positions={0: 1}, versions={"a": 2}, may_be_ahead=True)
    chain.expect(*(["sink-drift"] if drift else []), sink_in_flight=2, drift=drift)
    chain.applied({"a": "19"}, positions={0: 1}, may_be_ahead=True)
    chain.expect(drift={})  # without versions it is compared when nothing is in flight
    chain.applied({"a": "19"}, may_be_ahead=True)
    chain.expect("sink-drift", drift={"a": 1})


@pytest.mark.parametrize("has_version", [True, False])
def test_event_that_the_topic_may_have_dropped_is_neither_lost_nor_in_flight(
    chain_of: Callable[..., Chain], has_version: bool
) -> None:
    chain = chain_of(has_version=has_version)
    chain.written("b", "7", at_ms=NOW_MS - LATE_MS - 1)
    chain.publish(*chain.written("a", "5"))
    chain.dropped_until_ms = NOW_MS - LATE_MS
    chain.applied({"a": "5", "b": "7"}, not_compared="no sink has versions")
    chain.expect(in_flight=0, settled=True)


# Records that break the contract -----------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [10**30, "5"], ids=str)
def test_malformed_foreign_record_counts_nowhere(chain: Chain, change: object) -> None:
    chain.publish(*chain.written("a", "5"))
    foreign = chain.event("a", 999_999_943, at_ms=NOW_MS + MINUTE_MS)
    chain.publish(foreign, change=change)
    chain.applied({"a": "5"}, letters=invalid(foreign, TopicOffset(0, 1)))
    report = chain.expect("malformed-records", in_flight=0, drift={})
    assert report.topic(STOCK_TOPIC).malformed == {"schema violation": 1}
    assert report.findings[0].first.startswith("partition 0, offset 1: ")


def test_a_malformed_event_is_neither_lost_nor_a_gap_nor_drift(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(events[0])
    chain.publish(events[1], change=10**30)
    chain.publish(events[2])
    chain.applied({"a": "12"}, letters=invalid(events[1], TopicOffset(0, 1)))
    none = {"lost": [], "in_flight": 0, "drift": {}}
    chain.expect("malformed-records", "sink-parked", uncertain={"a"}, **none)


def test_topic_without_a_valid_event_is_never_a_pass(chain: Chain) -> None:
    for event in chain.written("a", *["1"] * 282):
        chain.record(event.event_id, "a", b'{"item": "a", "number": 1}')
    chain.applied({"a": "282"})
    report = chain.expect("nothing-compared", "malformed-records", lost=[], in_flight=0)
    assert report.count("malformed-records") == 282


# Foreign and pruned events -----------------------------------------------------------------------------------------


def test_event_younger_than_the_outbox_behind_it_is_foreign(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    foreign = chain.event("stranger", 1, "100", at_ms=NOW_MS + MINUTE_MS)
    chain.publish(events[0], foreign, events[1])
    chain.applied({"a": "11", "stranger": "100"})
    report = chain.expect("foreign-events", "sink-drift", pruned=0, drift={"stranger": 100})
    [finding, _] = report.findings
    assert (finding.count, finding.first) == (1, f"{foreign.event_id} at partition 0, offset 1, key stranger")


def test_foreign_content_in_front_of_an_event_with_its_id_is_a_difference(chain: Chain) -> None:
    [event] = chain.written("a", "5")
    chain.publish(event, change=9)
    chain.publish(event)
    chain.applied({"a": "9"})
    chain.expect("sink-drift", drift={"a": 4}, duplicates=1)


def test_erased_events_are_neither_foreign_nor_drift(chain: Chain) -> None:
    older, events = chain.written("b", "1", at_ms=NOW_MS - MINUTE_MS), chain.written("a", "5", "6")
    chain.publish(*older, *events)
    chain.prune(*events)
    chain.applied({"b": "1"})
    chain.expect("foreign-events", "sink-drift", drift={"a": -11})
    chain.erase("a")
    chain.publish(chain.event("a", 3), change="six")
    chain.expect(drift={}, uncertain={"a"}, lost=[], pruned=2, acknowledged=1)


def test_event_beyond_the_version_of_its_key_is_foreign(chain: Chain) -> None:
    chain.prune(*chain.written("a", "5"))
    foreign = chain.event("a", 1_000, "9")
    chain.publish(foreign)
    chain.applied({"a": "5"}, letters=letter(foreign))
    [found, _] = chain.expect("foreign-events", "sink-parked", drift={}).findings
    assert found.worst == found.first


def test_foreign_version_makes_no_gap_and_loses_nothing(chain: Chain) -> None:
    events = chain.written("a", "5", "6")
    chain.publish(events[0], chain.event("a", 999_999_943, "1"))
    chain.applied({"a": "6"})
    chain.expect("foreign-events", "sink-drift", lost=[], in_flight=1)


@pytest.mark.parametrize("older", ["a", "b"])
def test_an_event_relayed_late_makes_no_pruned_event_foreign(chain: Chain, older: str) -> None:
    """Its row is older and stays, but was committed after prune looked; or the pruned event is the late one."""
    (late,) = chain.written("a", "5", at_ms=NOW_MS - MINUTE_MS * (older == "a"))
    (pruned,) = chain.written("b", "6", at_ms=NOW_MS - MINUTE_MS * (older == "b"))
    chain.publish(*((pruned, late) if older == "a" else (late, pruned)))
    chain.prune(pruned)
    chain.applied({"a": "5", "b": "6"})
    chain.expect(pruned=1)


# Less declared -----------------------------------------------------------------------------------------------------


def test_without_a_version_a_lost_event_is_recognised_by_its_age(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(has_version=False)
    lost = chain.written("a", "5", at_ms=NOW_MS - LATE_MS - 1)
    chain.written("b", "6", at_ms=NOW_MS - LATE_MS + 1)
    chain.publish(*chain.written("c", "7"))
    chain.versions = {}
    chain.applied({"c": "7"})
    numbers = {"in_flight": 1, "sink_lost": 1, "sink_in_flight": 1, "drift": {}}
    chain.expect("events-lost", lost=[lost[0].event_id], **numbers)


# Several events and topics -----------------------------------------------------------------------------------------


def test_topics_are_compared_each_by_itself(chain_of: Callable[..., Chain]) -> None:
    """Events of two topics with one key and one version are different events of different keys."""
    chain = chain_of(names=("stock", "order"))
    stock = chain.written("a", "5", "6", "7")
    placed = [chain.event("a", version, "1", event="order/placed.v2") for version in (1, 2, 3)]
    chain.outbox += placed
    chain.versions["chain.order"]["a"] = 3
    chain.totals["a"] = Decimal(21)
    chain.publish(stock[0], stock[2], *placed, placed[0])
    chain.applied({"a": "15"})
    report = chain.expect("events-lost", records=6, outbox_events=6, sink_lost=1, drift={}, repeated={"a": 1})
    assert (report.findings[0].topic, report.findings[0].first) == (STOCK_TOPIC, stock[1].event_id)
    assert [(topic.records, topic.duplicates, len(topic.lost)) for topic in report.topics] == [(4, 1, 0), (2, 0, 1)]


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize(("asked", "uncertain"), [("order", set()), ("order.placed.v1", {"a"})])
def test_an_old_version_in_flight_adds_what_its_upcaster_says(
    chain_of: Callable[..., Chain], asked: str, uncertain: set[str], is_published: bool
) -> None:
    """A sink that asks for the old version alone has other numbers than the check."""
    chain = chain_of(names=(asked,))
    chain.publish(*chain.written("a", "36", event="order/placed.v1")[: int(is_published)])
    chain.applied({}, positions={"chain.order": {}})
    chain.expect(sink_in_flight=1, drift={}, uncertain=uncertain)


# Repeated versions, and keys on several partitions ------------------------------------------------------------------


def test_two_events_with_one_version_are_a_finding(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    twin = chain.event("a", 2, "6")
    chain.outbox.append(twin)
    chain.publish(*events, twin, events[0])
    chain.totals["a"] = Decimal(24)
    chain.applied({"a": "24"})
    [finding] = chain.expect("versions-repeated").findings
    assert (finding.count, finding.first) == (1, f"key a, version 2: {events[1].event_id} and {twin.event_id}")


def test_a_repeated_version_does_not_hide_a_missing_one(chain: Chain) -> None:
    events = chain.written("a", *"12345678")
    chain.prune(*events)
    versions = (1, 1, 4, 5, 5, 6, 6, 8)  # as many as 1 to 8, with the sum and the squares of those
    chain.publish(*(chain.event("a", version) for version in versions))
    chain.applied({"a": "36"})
    report = chain.expect("versions-missing", "versions-repeated")
    assert [finding.count for finding in report.findings] == [3, 3]


@pytest.mark.parametrize("has_version", [True, False])
def test_a_key_on_two_partitions_is_a_finding(chain_of: Callable[..., Chain], has_version: bool) -> None:
    chain = chain_of(has_version=has_version)
    events, others = chain.written("a", "5", "6"), chain.written("b", "7", "8")
    chain.publish(events[0], *others)
    chain.publish(events[1], partition=1)
    chain.applied({"a": "11", "b": "15"})
    report = chain.expect("keys-spread")
    assert (report.findings[0].count, report.findings[0].first) == (1, "key a, partitions 0, 1")
    assert "1 key with events on several partitions" in report.as_text()


# Discarded dead letters ---------------------------------------------------------------------------------------------


def test_a_discarded_event_is_due_no_more(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events)
    chain.applied({"a": "12"}, letters=letter(events[1], is_open=False), discarded={"test data": 1})
    report = chain.expect(settled=True, sink_parked=0)
    assert "1 discarded: test data (1)" in report.as_text()
    assert json.loads(report.as_json())["sinks"][0]["discarded"] == {"test data": 1}


def test_a_discarded_event_that_is_left_nowhere_else_is_due_no_more(chain: Chain) -> None:
    events = chain.written("a", "5", "6", "7")
    chain.publish(*events[2:])
    chain.prune(*events[:2])
    chain.dropped_until_ms = 0
    letters = letter(events[1], is_open=False)
    chain.applied({"a": "12"}, letters=letters, versions={"a": 3})
    chain.expect()
    chain.applied({"a": "13"}, letters=letters, versions={"a": 3})
    chain.expect("sink-drift", drift={"a": 1})


@pytest.mark.parametrize("is_pruned", [False, True])
def test_a_discarded_invalid_event_explains_a_difference_of_its_key(chain: Chain, is_pruned: bool) -> None:
    events, others = chain.written("a", "5", "6"), chain.written("b", "7")
    chain.publish(events[0], *others)
    chain.publish(events[1], change="six")
    if is_pruned:
        chain.prune(*events)
    chain.acknowledged = {events[1].event_id}
    chain.applied({"a": "5", "b": "8"}, letters=invalid(events[1], TopicOffset(0, 2), is_open=False))
    chain.expect("sink-drift", drift={"b": Decimal(1)}, uncertain={"a"}, in_flight=0)


# Comparisons -------------------------------------------------------------------------------------------------------


def test_each_comparison_is_reported(chain_of: Callable[..., Chain]) -> None:
    count = Comparison(Path("count.sql"), (AddsLine(1, None, frozenset({"stock.changed"})),), "")
    chain = chain_of(comparisons=(STOCK, count))
    chain.publish(*chain.written("a", "5", "6"))
    chain.applied({"a": "5"}, positions={0: 1})
    report = chain.compare()
    drifts = [(one.name, one.drift) for one in only_sink(report).comparisons]
    assert drifts == [("stock", {}), ("count", {"a": Decimal(-5)})]
    [finding] = report.findings
    assert (finding.code, finding.sink, finding.comparison) == ("sink-drift", SINK, "count")


def test_without_adds_totals_are_compared_when_nothing_is_in_flight(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(comparisons=(Comparison(Path("state.sql"), (), ""),))
    events = chain.written("a", "5", "6")
    chain.publish(*events, *chain.written("b", "1"))
    chain.applied({"a": "5", "b": "1"}, positions={0: 2})
    assert only_comparison(chain.expect()).not_compared.startswith("not now: events of 1 key")
    chain.applied({"a": "5", "b": "1"})
    chain.expect("sink-drift", drift={"a": -6})
    chain.applied({"a": "5", "b": "2"}, letters=letter(events[1]))
    chain.expect("sink-drift", "sink-parked", drift={"b": Decimal(1)}, uncertain={"a"})


def test_a_sink_of_states_has_the_total_of_its_version(chain: Chain) -> None:
    sides = {
        SOURCE: {"a": ("5", 2), "b": ("6", 4), "c": ("0", 0)},
        SINK_ROWS: {"a": ("7", 2), "b": ("1", 1), "gone": ("9", 1), "nothing": ("0", 1)},
    }
    with closing(Store()) as rows:
        for table, totals in sides.items():
            sink = "" if table is SOURCE else SINK
            load_rows(rows, table, [(STOCK, [(sink, key, one[1], one[0]) for key, one in totals.items()])])
        report = compare_states(chain.declared, SinkState(SINK, carries="states"), rows)
    assert report.drift == {"a": 2, "gone": 9}
    assert report.in_flight == 3 + 1


# Files -------------------------------------------------------------------------------------------------------------

QUERIES = "\n-- [source]\nSELECT key, total FROM orders;\n\n-- [sink]\nSELECT sink, key, total FROM totals\n"


def written(chain: Chain, folder: Path, text: str, **job: Any) -> Comparison:
    """The comparison of a file with this text."""
    spec: SinkSpec = chain.declared.sinks[SINK]
    spec = replace(spec, job=replace(spec.job, projections=folder / "projections", **job))
    assert comparison_files.load(spec) == [], "no folder is no comparison"
    file = comparison_files.folder_of(spec) / "totals.sql"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    (found,) = comparison_files.load(spec)
    return found


@pytest.mark.parametrize(
    ("adds", "expected"),
    [
        ("-- adds: 1", [Addend(1)] * 4),
        ("-- adds: -change of stock.changed\n-- adds: 1 of order", [Addend(-1, 0), None, Addend(1), Addend(1)]),
        ("-- adds: 1 of order.placed.v2, stock.named", [None, Addend(1), None, Addend(1)]),
        ("", [None] * 4),
    ],
    ids=["all events", "named events", "one version", "nothing"],
)
def test_a_file_says_what_each_event_adds(
    chain_of: Callable[..., Chain], tmp_path: Path, adds: str, expected: list[Addend | None]
) -> None:
    chain = chain_of(names=("stock", "order"), comparisons=())
    found = written(chain, tmp_path, f"{adds}\n{QUERIES}")
    assert (found.source, found.sink) == ("SELECT key, total FROM orders", "SELECT sink, key, total FROM totals")
    topics = [replace(topic, properties=["change"]) for topic in chain.declared.topics]
    declared = replace(chain.declared, comparisons={SINK: [found]}, topics=topics)
    addends = declared.addends(declared.sinks[SINK], found)
    by_kind = {kind.schema.name: addend for kind, addend in zip(declared.kinds, addends, strict=True)}
    names = ("stock.changed.v1", "stock.named.v1", "order.placed.v1", "order.placed.v2")
    assert [by_kind[name] for name in names] == expected


@pytest.mark.parametrize(
    ("adds", "problem"),
    [
        ("-- adds quantity", "`-- adds quantity` cannot be read"),
        ("-- adds: change, name", "cannot be read"),
        ("-- adds: change", "adds: change is no property of stock.named, and not a number"),
        ("-- adds: name of stock.named", "adds: name is text of stock.named"),
        ("-- adds: 1 of stock.unheard", "sink dedup has no event stock.unheard"),
        ("-- adds: 1 of stock\n-- adds: 1 of stock.changed", "two lines `adds` are about stock.changed"),
        ("-- adds: 1", "states add nothing"),
    ],
)
def test_a_line_that_nobody_can_follow_is_refused(chain: Chain, tmp_path: Path, adds: str, problem: str) -> None:
    with raises("comparison-unusable", "totals.sql", problem):
        written(chain, tmp_path, f"{adds}\n{QUERIES}", carries="states" if "states" in problem else "events")


# Tables ------------------------------------------------------------------------------------------------------------

EVENTS = 250_000
ID = "019a0000-0000-7000-8000-{:012x}"
DELIVERED = f"""
INSERT INTO delivered
SELECT 1, 0, masked(format('019a0000-0000-7000-8000-{{:012x}}', number)), 'key ' || number % 10,
       1 + number // 10, 0, number, ['1']
  FROM range({EVENTS}) AS numbers (number)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


def test_memory_does_not_grow_with_the_number_of_events_and_a_full_disk_is_a_failure(
    chain: Chain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the events were pruned."""
    monkeypatch.setitem(store.CONFIG, "memory_limit", "32MB")
    monkeypatch.setitem(store.CONFIG, "threads", 1)
    monkeypatch.setattr(comparison, "PASS_ROWS", EVENTS // 4)
    for temporary in ("1GB", "1MB"):
        source = Source(
            Written(1, 0, ID.format(number), f"key {number % 10}", 1 + number // 10, NOW_MS, ["1"])
            for number in range(0, EVENTS, 2)
        )
        with closing(TopicLogs(chain.declared.topics)) as logs:
            logs.store.run(DELIVERED)
            logs.store.run(f"SET max_temp_directory_size = '{temporary}'")
            observed = Observed(chain.declared, Sinks(), logs, source)
            if temporary == "1MB":
                with raises("no-room", "point TMPDIR"):
                    compare(observed, lambda _: None)
                continue
            report = compare(observed, lambda _: None)
            assert (report.outbox_events, report.pruned, codes(report)) == (EVENTS // 2, EVENTS // 2, [])
            assert list(folder.glob(f"{store.FOLDER_PREFIX}*/*")), "nothing was spilled"


def test_temporary_files_are_private_and_deleted_also_those_of_a_killed_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = folder / f"{store.FOLDER_PREFIX}left"
    left.mkdir()
    (left / "rows.tmp").touch()
    with closing(Store()), closing(Store()):
        made = list(folder.iterdir())
        assert (len(made), left.exists()) == (2, False), "those of checks that run stay"
        assert {one.stat().st_mode & 0o777 for one in made} == {0o700}
    assert not list(folder.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "missing"))
    with raises("no-room", "point TMPDIR"):
        Store()
