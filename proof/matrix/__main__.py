"""Measure the matrix. Status 1 if a fault did not happen, if a sink drifts otherwise than its strategy promises, or if
the document says something else.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from outbox.jvm import jars
from outbox_lab.testing.homes import Homes

from proof.matrix import results, table
from proof.matrix.chain import Chain
from proof.matrix.column import Cell, measure
from proof.matrix.faults import FAULTS, Fault, NotFired
from proof.matrix.ledger import SEED, TRANSFERS, Ledger
from proof.matrix.results import Column, Results

MODES = {"off": False, "on": True}
JARS = {"Debezium": "debezium-connector-postgres", "Kafka": "kafka_2.13", "Delta": "delta-spark_2.13"}


def main(words: Sequence[str]) -> int:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m proof.matrix", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results.json and the table of the document")
    parser.add_argument("--exactly-once", choices=MODES, action="append", help="only in this mode")
    parser.add_argument("--fault", choices=[fault.name for fault in FAULTS], action="append", help="only this fault")
    parser.add_argument("--missing", action="store_true", help="only what results.json lacks")
    parser.add_argument("--render", action="store_true", help="measure nothing, and write the table of results.json")
    arguments = parser.parse_args(words)
    recorded = results.load()
    chosen = [
        (fault, MODES[mode])
        for mode in arguments.exactly_once or MODES
        for fault in FAULTS
        if not arguments.fault or fault.name in arguments.fault
        if not arguments.missing or recorded.column(fault.name, exactly_once=MODES[mode]) is None
    ]
    problems: list[str] = []
    for column in [] if arguments.render else run(chosen):
        problems += broken_promises(column)
        if arguments.write:
            write([column])
        else:
            problems += differences(column, recorded)
    if arguments.render:
        write([])
    elif not arguments.write and table.document(recorded) != table.DOCUMENT.read_text():
        problems.append("the document has another table than results.json: `make matrix ARGS=--render`")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def run(chosen: Sequence[tuple[Fault, bool]]) -> Iterator[Column]:
    """Measure faults, each in a mode of exactly-once, on one new stack."""
    if not chosen:
        return
    homes = Homes()
    chain = Chain(homes.new("matrix"), exactly_once=chosen[0][1])
    is_whole = False
    try:
        chain.start()
        ledger = Ledger(chain.settings)
        for fault, mode in chosen:
            if mode is not chain.exactly_once:
                chain.switch(exactly_once=mode)
            began_s = time.monotonic()
            cells, evidence = measure(chain, ledger, fault)
            _say(
                f"{fault.name}, exactly-once {'on' if mode else 'off'}, {time.monotonic() - began_s:.0f} s: {evidence}"
            )
            _say(f"  {_summary(cells)}")
            yield Column(fault.name, mode, datetime.now(UTC).date().isoformat(), cells)
        is_whole = True
    finally:
        homes.close(keep_logs=not is_whole)


def write(measured: Sequence[Column]) -> None:
    """Record columns, and write the table of all that are recorded."""
    written = Results(SEED, 2 * TRANSFERS, versions(), results.load().with_columns(measured))
    results.store(written)
    table.DOCUMENT.write_text(table.document(written))


def broken_promises(column: Column) -> list[str]:
    """Sinks that have drifted otherwise than their strategies promise."""
    return [
        f"{column.fault}: {strategy} drifts by {cell.drift}, and promises {cell.due}"
        for strategy, cell in column.cells.items()
        if cell.drift != cell.due
    ]


def differences(column: Column, recorded: Results) -> list[str]:
    """How a column differs from the recorded one.

    Of a fault that repeats everything so far the numbers depend on what was measured before it; only whether a sink
    drifts is compared.
    """
    found: list[str] = []
    before = recorded.column(column.fault, exactly_once=column.exactly_once)
    if before is None:
        return [f"{column.fault}: it is not in results.json"]
    is_exact = not any(fault.name == column.fault and fault.repeats_history for fault in FAULTS)
    for strategy, cell in column.cells.items():
        now, then = (_shown(one, is_exact=is_exact) for one in (cell, before.cells[strategy]))
        if now != then:
            found.append(f"{column.fault}: {strategy} has {now}, and results.json has {then}")
    return found


def versions() -> dict[str, str]:
    """Of the parts that the results are about."""
    lines = [line.split() for line in jars.LOCK_FILE.read_text().splitlines() if not line.startswith("#")]
    found = {name: line[3] for name, module in JARS.items() for line in lines if line[2] == module}
    return {**found, "PySpark": importlib.metadata.version("pyspark")}


def _shown(cell: Cell, *, is_exact: bool) -> tuple[int, int]:
    return (cell.repeats, cell.drift) if is_exact else (min(1, cell.repeats), min(1, cell.drift))


def _summary(cells: Mapping[str, Cell]) -> str:
    return ", ".join(f"{strategy} {cell.repeats} -> {cell.drift}" for strategy, cell in cells.items())


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NotFired as error:
        sys.exit(f"proof.matrix: {error}")
