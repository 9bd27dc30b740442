"""The matrix in docs/strategies.md is what was measured, of every strategy and fault, and what is promised."""

from __future__ import annotations

import pytest
from outbox.base import settings
from outbox.sink import discovery
from outbox.sink.remembering.strategy import Strategy

from proof.matrix import results, table
from proof.matrix.chain import SINKS
from proof.matrix.faults import FAULTS
from proof.matrix.ledger import SEED, TRANSFERS
from proof.matrix.results import Column, Results

RECORDED = results.load()
SPECS = discovery.sinks(settings.load(environment=False))
COUNTING = "naive-logged"  # `naive`, which counts for the soak
OF_SINK = {"sink-killed", "sink-rewound", "checkpoint-deleted"}  # faults that repeat by re-reads


def strategy(name: str) -> Strategy:
    return SPECS[SINKS[name]].strategy


@pytest.fixture(params=RECORDED.columns, ids=lambda column: f"{column.fault}-{column.exactly_once}")
def column(request: pytest.FixtureRequest) -> Column:
    found: Column = request.param
    return found


def test_the_document_has_the_recorded_table() -> None:
    assert table.document(RECORDED) == table.DOCUMENT.read_text()
    assert table.render(RECORDED) in table.DOCUMENT.read_text()


def test_the_table_has_every_fault_in_both_modes() -> None:
    rows = [line.split(" | ")[:2] for line in table.render(RECORDED).splitlines()[2:]]
    assert rows == [[f"| {fault.title}", mode] for fault in FAULTS for mode in ("off", "on")]
    assert {one.fault for one in RECORDED.columns} <= {fault.name for fault in FAULTS}


def test_a_column_without_results_says_so() -> None:
    assert table.render(Results()).count("not measured yet") == 2 * len(FAULTS)


def test_every_strategy_was_measured(column: Column) -> None:
    declared = {one.strategy.name for one in SPECS.values()} - {COUNTING}
    assert {*column.cells} == {*SINKS} == declared
    assert {name: strategy(name).name for name in SINKS} == {name: name for name in SINKS}


def test_the_workload_is_that_of_the_results() -> None:
    assert (RECORDED.seed, RECORDED.events) == (SEED, 2 * TRANSFERS)


def test_each_sink_drifts_by_what_its_strategy_does_not_promise(column: Column) -> None:
    drifts = {name for name, cell in column.cells.items() if cell.drift}
    repeated = {name for name, cell in column.cells.items() if cell.repeats}
    survives = ("all", "re-reads") if column.fault in OF_SINK else ("all",)
    assert drifts == {name for name in repeated if strategy(name).repeats not in survives}
    assert {name: cell.drift for name, cell in column.cells.items()} == {
        name: cell.due for name, cell in column.cells.items()
    }


def test_exactly_once_ends_at_kafka(column: Column) -> None:
    [fault] = [one for one in FAULTS if one.name == column.fault]
    is_prevented = fault.is_of_relay and column.exactly_once
    assert bool(column.cells["naive"].repeats) is not is_prevented
