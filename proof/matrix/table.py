"""The results as the table of docs/strategies.md."""

from __future__ import annotations

import re
from pathlib import Path

from proof.matrix.chain import SINKS
from proof.matrix.column import Cell
from proof.matrix.faults import FAULTS
from proof.matrix.results import Column, Results

DOCUMENT = Path(__file__).parents[2] / "machinery" / "docs" / "strategies.md"
BEGIN, END = "<!-- proof.matrix writes this table -->", "<!-- to here -->"


def render(results: Results) -> str:
    """The table: a row for each fault and mode, a column for each strategy."""
    heads = ["fault", "exactly-once", "repeated", *(f"`{strategy}`" for strategy in SINKS)]
    lines = [_row(heads), _row(["---"] * 2 + ["---:"] * (len(heads) - 2))]
    for fault in FAULTS:
        for mode in (False, True):
            column = results.column(fault.name, exactly_once=mode)
            lines.append(_row([fault.title, "on" if mode else "off", *_measured(column)]))
    return "\n".join(lines)


def document(results: Results) -> str:
    """The document with the table of these results."""
    text = DOCUMENT.read_text()
    pattern = re.compile(f"({re.escape(BEGIN)}\n).*?({re.escape(END)}\n)", re.DOTALL)
    return pattern.sub(lambda found: f"{found[1]}\n{render(results)}\n\n{found[2]}", text)


def _measured(column: Column | None) -> list[str]:
    """Repeats of one fault, and its effect on each sink."""
    if column is None:
        return ["not measured yet", *[""] * len(SINKS)]
    return [str(column.cells["naive"].repeats), *(_text(column.cells[strategy]) for strategy in SINKS)]


def _text(cell: Cell) -> str:
    """A dash if nothing was repeated to the sink; else its drift, in bold if it has drifted."""
    if not cell.repeats:
        return "–"
    return f"**{cell.drift:,}**" if cell.drift else "0"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
