"""Readings of the chain on the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from demo.page.drift import Drift
from demo.page.journeys import Journeys
from demo.page.readings import Batch, Down, OutboxRow, Readings, Record, Sink, Total
from demo.page.state import State
from template.tests.page.made_up import NAIVE, RIGHT, MadeUp

AT_MS = 1_790_000_000_000


@pytest.fixture
def model() -> MadeUp:
    return MadeUp()


def sink(shown: dict[str, object], name: str) -> dict[str, object]:
    part = shown["sinks"]
    assert isinstance(part, dict)
    [found] = [one for one in part["sinks"] if one["name"] == name]
    assert isinstance(found, dict)
    return found


def without(readings: Readings, part: str) -> Readings:
    """Readings in which a part is down."""
    changes: dict[str, Any] = {part: Down("it does not answer")}
    return replace(readings, **changes)


# Drift ------------------------------------------------------------------------------------------------------------


def test_a_key_is_compared_where_both_have_the_same_events() -> None:
    drift = Drift()
    source = {"a": Total(10, 2), "b": Total(5, 1)}
    drift.compare(source, {"a": Total(10, 2), "b": Total(12, 1)})
    assert (drift.total, drift.keys, drift.pending) == (7, 1, 0)
    drift.compare(source | {"b": Total(6, 2)}, {"a": Total(3, 1), "b": Total(12, 1)})
    assert (drift.total, drift.keys, drift.pending) == (7, 1, 2)  # as it was known last
    drift.compare(source, {"a": Total(10, 2), "b": Total(5, 1)})
    assert (drift.total, drift.keys, drift.pending) == (0, 0, 0)


@pytest.mark.parametrize(
    ("source", "of_sink", "expected"),
    [
        ({"a": Total(0, 1), "b": Total(0, 1)}, {"a": Total(-4, 1), "b": Total(4, 1)}, (8, 2, 0)),
        ({"a": Total(0, 0)}, {}, (0, 0, 0)),
        ({}, {"a": Total(-4, 1)}, (4, 1, 0)),
    ],
    ids=["opposite drifts", "a key without events", "a key that only the sink has"],
)
def test_drifts_add_up_over_all_keys(
    source: dict[str, Total], of_sink: dict[str, Total], expected: tuple[int, int, int]
) -> None:
    drift = Drift()
    drift.compare(source, of_sink)
    assert (drift.total, drift.keys, drift.pending) == expected


# Journeys ---------------------------------------------------------------------------------------------------------


ROW = OutboxRow("e", "balance", "credited", 1, "a", 5, AT_MS)


def record(offset: int, event_id: str | None = "e") -> Record:
    return Record("t", 0, offset, event_id, "a", {}, "{}", AT_MS + offset)


def reader(position: int, name: str = "s") -> Sink:
    return Sink(name, "dedup", None, 0, 0, 0, 0, {"t": {0: position}}, {})


def test_an_event_is_followed_through_every_hop() -> None:
    journeys = Journeys()
    journeys.add_rows([ROW], lsn=0x1_0000_00FF)
    journeys.add_records([record(7)])
    journeys.add_sinks([reader(7)], AT_MS + 50)
    assert journeys.changed()[0].as_json()["sinks"]["s"]["at_ms"] is None
    journeys.add_sinks([reader(8)], AT_MS + 90)
    [changed] = journeys.changed()
    shown = changed.as_json()
    assert shown["lsn"] == "1/FF"
    assert shown["records"][0]["offset"] == 7
    assert shown["sinks"]["s"]["at_ms"] == AT_MS + 90
    journeys.add_sinks([reader(9)], AT_MS + 99)
    assert journeys.changed() == []


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([Batch(3, {"t": {0: 7}}, AT_MS + 20), Batch(4, {"t": {0: 9}}, AT_MS + 40)], (4, AT_MS + 40)),
        ([Batch(3, {"t": {0: 9}}, AT_MS + 40), Batch(4, {"t": {0: 12}}, AT_MS + 60)], (None, None)),
        ([Batch(4, {"t": {0: 12}}, AT_MS + 60)], (None, None)),
        ([Batch(0, {"t": {0: 9}}, AT_MS + 40)], (0, AT_MS + 40)),
    ],
    ids=["known", "maybe in one that is not kept", "in one that is not kept", "the first of all"],
)
def test_the_batch_of_an_event_is_shown_where_it_is_certain(
    batches: list[Batch], expected: tuple[int | None, int | None]
) -> None:
    journeys = Journeys()
    journeys.add_records([record(7)])
    journeys.add_sinks([replace(reader(12), batches=batches)], AT_MS + 500)
    [changed] = journeys.changed()
    assert changed.as_json()["sinks"]["s"] == {"batch": expected[0], "applied": True, "at_ms": expected[1]}


def test_a_repeat_is_counted_and_belongs_to_its_event() -> None:
    journeys = Journeys()
    journeys.add_records([record(7), record(9)])
    assert journeys.repeats == 1
    found = journeys.get("e")
    assert found is not None
    assert [one.offset for one in found.records] == [7, 9]


def test_a_record_that_was_never_in_the_outbox_is_no_event_of_ours() -> None:
    journeys = Journeys()
    journeys.add_rows([ROW], lsn=1, oldest_ms=AT_MS)
    headers = {"eventType": "credited", "schemaVersion": "1"}  # as the relay writes them
    journeys.add_records([record(7), record(8, None), replace(record(9, "forged"), headers=headers)])
    assert journeys.strangers == 2
    shown = {one.id: one.as_json() for one in journeys.changed()}
    assert shown["e"]["type"] == "credited"
    assert shown["forged"]["type"] == shown["t/0/8"]["type"] == ""


def test_a_burst_does_not_hide_what_became_of_the_newest_events() -> None:
    journeys = Journeys()
    rows = [replace(ROW, id=str(number), occurred_ms=AT_MS + number) for number in range(2_000)]
    for _ in range(2):  # the newest rows are read again and again, records once
        journeys.add_rows(rows[-200:], lsn=1)
        records = [record(number, str(number)) for number in reversed(range(2_000))]
        journeys.add_records([] if journeys.has_come("0") else records)
        journeys.add_sinks([reader(2_000)], AT_MS + 9_000)
        shown = [one.as_json() for one in journeys.changed()]
    assert shown == []
    for row in rows[-200:]:
        found = journeys.get(row.id)
        assert found is not None
        assert len(found.records) == 1
        assert found.sinks["s"].is_applied


# State ------------------------------------------------------------------------------------------------------------


def test_both_sinks_agree_without_a_fault(model: MadeUp) -> None:
    state = State()
    model.transfer(AT_MS)
    shown = state.apply(model.readings(AT_MS))
    assert sink(shown.parts, RIGHT)["drift"] == sink(shown.parts, NAIVE)["drift"] == 0
    assert state.settled
    assert len(shown.tables["events"]) == 2


def test_the_moment_at_which_sinks_part_is_marked_once_with_its_cause(model: MadeUp) -> None:
    state = State()
    model.transfer(AT_MS)
    assert state.apply(model.readings(AT_MS)).logs["marks"] == []
    state.cause = "Kill the connector"
    model.repeat(1, AT_MS)
    [mark] = state.apply(model.readings(AT_MS + 500)).logs["marks"]
    assert "Kill the connector" in mark["text"]
    assert {RIGHT, NAIVE} <= set(mark["text"].replace(":", " ").split())
    assert state.apply(model.readings(AT_MS + 1_000)).logs["marks"] == []
    model.repeat(1, AT_MS)  # more of the same
    assert state.apply(model.readings(AT_MS + 1_500)).logs["marks"] == []
    state.cause = "Rewind sink B"
    model.repeat(1, AT_MS)
    [mark] = state.apply(model.readings(AT_MS + 2_000)).logs["marks"]
    assert "Rewind sink B" in mark["text"]
    assert state.summary[NAIVE]["drift"] > 0
    assert state.summary[RIGHT]["drift"] == 0


def test_nothing_is_compared_while_the_source_is_down(model: MadeUp) -> None:
    state = State()
    shown = sink(state.apply(without(model.readings(AT_MS), "source")).parts, NAIVE)
    assert (shown["drift"], shown["compared"]) == (0, False)
    shown = sink(state.apply(model.readings(AT_MS)).parts, NAIVE)
    assert (shown["drift"], shown["compared"]) == (0, True)


def test_a_rewound_sink_is_behind_and_shows_its_first_batch(model: MadeUp) -> None:
    state = State()
    readings = model.readings(AT_MS)
    sinks = readings.sinks
    assert not isinstance(sinks, Down)
    ends = {"ledger.balance": {0: 3}}
    for committed_ms, lag in ((None, 480), (AT_MS, 477)):
        again = replace(sinks[0], generation=1, batches=[Batch(0, ends, committed_ms)])
        shown = sink(state.apply(replace(readings, sinks=[again, *sinks[1:]])).parts, RIGHT)
        assert shown["batches"] == [{"number": 0, "records": 3, "committed": committed_ms is not None}]
        assert shown["lag"] == sum(sum(of.values()) for of in model.ends.values()) - 480 + lag


def test_a_record_that_came_again_is_drawn_with_a_ring(model: MadeUp) -> None:
    state = State()
    model.transfer(AT_MS)
    state.apply(model.readings(AT_MS))
    model.repeat(2, AT_MS)
    shown = state.apply(model.readings(AT_MS))
    drawn = [
        one["again"]
        for topic in shown.parts["topics"]["topics"]
        for partition in topic["partitions"]
        for one in partition["newest"]
    ]
    assert sorted(drawn) == [False, False, True, True]
    assert shown.parts["topics"]["repeats"] == 2


@pytest.mark.parametrize("part", ["source", "slot", "connector", "topics", "sinks", "health"])
def test_a_part_that_is_down_is_shown_as_down_and_comes_back(model: MadeUp, part: str) -> None:
    state = State()
    model.transfer(AT_MS)
    up = state.apply(model.readings(AT_MS)).parts
    down = state.apply(without(model.readings(AT_MS), part)).parts
    if part == "health":
        assert sink(down, RIGHT)["state"] == "down"
    else:
        name = "connect" if part == "connector" else part
        assert down[name] == {"down": "it does not answer"}
        assert "down" not in up[name]
    again = state.apply(model.readings(AT_MS)).parts
    assert again.keys() == up.keys()
    assert all("down" not in value for value in again.values())


@pytest.mark.parametrize("part", ["source", "topics", "sinks", "health"])
def test_nothing_is_settled_while_a_part_does_not_answer(model: MadeUp, part: str) -> None:
    state = State()
    state.apply(without(model.readings(AT_MS), part))
    assert not state.settled


def test_a_sink_that_reads_again_is_not_settled(model: MadeUp) -> None:
    state = State()
    readings = model.readings(AT_MS)
    sinks = readings.sinks
    assert not isinstance(sinks, Down)
    behind = replace(sinks[0], batches=[replace(sinks[0].batches[-1], ends={"ledger.balance": {0: 3}})])
    state.apply(replace(readings, sinks=[behind, *sinks[1:]]))
    assert not state.settled
    state.apply(readings)
    assert state.settled
