"""Counting functions of the matrix, on hand-written logs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from proof.matrix import results, sink_log, topic_log
from proof.matrix.__main__ import broken_promises, differences
from proof.matrix.column import Cell
from proof.matrix.results import Column, Results
from proof.matrix.topic_log import Record

DRIFTED = Cell(repeats=2, drift=7, due=7)


def record(offset: int, identity: str) -> Record:
    return Record(0, offset, identity, "key", 1)


def column(cell: Cell, fault: str = "sent-again") -> Column:
    return Column(fault, exactly_once=True, date="2026-11-25", cells={"naive": cell})


def test_a_repeat_is_a_later_record_of_the_same_event() -> None:
    before = [record(0, "a"), record(1, "b")]
    new = [record(2, "b"), record(3, "c"), record(4, "c"), record(5, "c")]
    assert [one.offset for one in topic_log.repeats(before, new)] == [2, 4, 5]
    assert topic_log.repeats(before, [record(2, "c")]) == []


def test_work_is_read_from_where_the_log_was_long(tmp_path: Path) -> None:
    file = tmp_path / "sinks.log"
    started = {"event": "started", "sink": "one", "next_offsets": {"topic": {"0": 5}}}
    lines = [{"event": "applied", "sink": "one", "rows": 3}, started, {"event": "applied", "sink": "one", "rows": 4}]
    file.write_text(json.dumps(lines[0]) + "\n")
    before = sink_log.size_bytes(file)
    with file.open("a") as log:
        log.write("a line of the JVM\n" + "".join(json.dumps(line) + "\n" for line in lines[1:]))
    assert sink_log.read(file, before) == {"one": sink_log.Work(rows=4, beginnings=[{0: 5}])}
    assert sink_log.read(file, 0)["one"].rows == 7


@pytest.mark.parametrize("change", [{"drift": 8}, {"drift": 0}, {"repeats": 0}])
def test_a_cell_that_differs_from_the_recorded_one_is_found(change: dict[str, int]) -> None:
    recorded = Results(columns=[column(DRIFTED)])
    assert differences(column(DRIFTED), recorded) == []
    assert len(differences(column(replace(DRIFTED, **change)), recorded)) == 1


def test_fault_that_repeats_everything_compares_only_drift() -> None:
    recorded = Results(columns=[column(DRIFTED, "offsets-reset")])
    other = column(replace(DRIFTED, repeats=3, drift=8), "offsets-reset")
    assert differences(other, recorded) == []
    assert len(differences(column(replace(DRIFTED, drift=0), "offsets-reset"), recorded)) == 1


def test_a_column_that_was_never_recorded_is_a_difference() -> None:
    assert len(differences(column(DRIFTED), Results())) == 1


def test_a_drift_that_is_not_promised_is_found() -> None:
    assert broken_promises(column(DRIFTED)) == []
    assert len(broken_promises(column(replace(DRIFTED, due=0)))) == 1


def test_a_new_column_takes_the_place_of_the_recorded_one() -> None:
    recorded = Results(columns=[column(DRIFTED), column(DRIFTED, "worker-killed"), column(DRIFTED, "unknown")])
    merged = recorded.with_columns([column(replace(DRIFTED, drift=9))])
    assert [(one.fault, one.cells["naive"].drift) for one in merged] == [("worker-killed", 7), ("sent-again", 9)]


def test_results_are_read_as_they_were_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    stored = Results(25, 40, {"Kafka": "4.3.1"}, [column(DRIFTED)])
    results.store(stored)
    assert results.load() == stored
