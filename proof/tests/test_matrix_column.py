"""A column of the matrix, measured again: what is recorded does not age unnoticed."""

from __future__ import annotations

from proof.matrix import results
from proof.matrix.__main__ import broken_promises, differences, run
from proof.matrix.faults import FAULTS

CHEAPEST = "worker-killed"


def test_a_killed_worker_repeats_what_was_recorded() -> None:
    [column] = run([(fault, False) for fault in FAULTS if fault.name == CHEAPEST])
    assert column.cells["naive"].repeats
    assert broken_promises(column) == []
    assert differences(column, results.load()) == []
