"""The recorded results: results.json, which `python -m proof.matrix --write` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from proof.matrix.column import Cell
from proof.matrix.faults import FAULTS

FILE = Path(__file__).with_name("results.json")


@dataclass(frozen=True)
class Column:
    """The effect of one fault in one mode, by strategy."""

    fault: str
    exactly_once: bool
    date: str
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Results:
    """All columns, with how they were measured."""

    seed: int = 0
    events: int = 0  # of the burst of each fault
    versions: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[Column] = ()

    def column(self, fault: str, *, exactly_once: bool) -> Column | None:
        """The column of a fault; None if it was not measured."""
        return next((one for one in self.columns if (one.fault, one.exactly_once) == (fault, exactly_once)), None)

    def with_columns(self, measured: Sequence[Column]) -> Sequence[Column]:
        """The columns, with these in the place of earlier ones, in the order of the faults."""
        both = [*measured, *self.columns]
        newest = {(one.fault, one.exactly_once): one for one in reversed(both)}
        order = [(fault.name, mode) for fault in FAULTS for mode in (False, True)]
        return [newest[key] for key in order if key in newest]


def load() -> Results:
    """The recorded results; empty if the file does not exist."""
    return msgspec.json.decode(FILE.read_bytes(), type=Results) if FILE.exists() else Results()


def store(results: Results) -> None:
    """Record results."""
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
