"""The folder of a run: everything that a verdict needs, so that it can be judged again.

run.json          seed, duration, faults, sinks
history.jsonl     the requests, a line each
injections.json   the faults
seen.json         what was left
verdict.json      the verdict
stack/logs/       the logs of all parts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from outbox.base.errors import Failure
from outbox.soak import history
from outbox.soak.history import History
from outbox.soak.injection import Injection
from outbox.soak.seen import Seen
from outbox.soak.verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    seed: int
    duration_s: float
    rate: float
    pause_s: float
    exactly_once: bool
    faults: Sequence[str]


class Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history_file = path / "history.jsonl"

    def write(self, name: str, content: Any) -> None:
        """Write a file, whole or not at all."""
        new = self.path / f"{name}.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        new.rename(self.path / name)

    @property
    def plan(self) -> Plan:
        """What was asked for."""
        return self._read("run.json", Plan)

    @property
    def injections(self) -> list[Injection]:
        """The faults."""
        return self._read("injections.json", list[Injection])

    @property
    def seen(self) -> Seen:
        """What was left."""
        return self._read("seen.json", Seen)

    @property
    def verdict(self) -> Verdict:
        """The verdict."""
        return self._read("verdict.json", Verdict)

    @property
    def history(self) -> History:
        """The requests."""
        with self._opened("history.jsonl").open(encoding="utf-8") as lines:
            return history.read(lines)

    def _read(self, name: str, kind: type[T]) -> T:
        return msgspec.json.decode(self._opened(name).read_bytes(), type=kind)

    def _opened(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            raise Failure(
                f"there is no {file}: the run did not get so far", "judge another run", code="soak-incomplete"
            )
        return file
