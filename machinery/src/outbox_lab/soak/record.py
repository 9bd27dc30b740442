"""The record of a run: everything that a verdict needs, in the files of a folder, so that it can be judged again.

run.json          seed, duration, faults, sinks
history.jsonl     the requests, a line each
injections.json   the faults
deaths.json       the processes that have ended
checks.json       what `outbox check` said during the run and at its end
events.jsonl      the events on the topics, a line each
seen.json         the rest of what was left: source and sinks
verdict.json      the verdict
stack/logs/       the logs of all parts
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from outbox.base.errors import Failure
from outbox_lab.soak.domain import Domain
from outbox_lab.soak.history import Attempt, Checked, Death, History, Injection, Seen, TopicEvent

T = TypeVar("T")
# A fault of one of these may let sinks read records again: they repeat a batch if they do not know its outcome.
REREADING = {"sinks", "postgres", "kafka", "sinks-postgres", "sinks-kafka"}


@dataclass(frozen=True)
class Plan:
    """The plan of the run."""

    seed: int
    duration_s: float
    rate: float
    pause_s: float
    exactly_once: bool
    faults: Sequence[str]
    """The faults that were selected."""
    timeout_scale: float = 1.0
    """The factor that multiplies every deadline."""


@dataclass(frozen=True)
class RunRecord:
    """Everything that is judged, and the domain that knows what it means."""

    domain: Domain
    plan: Plan
    history: History = field(default_factory=History)
    seen: Seen = field(default_factory=Seen)
    injections: Sequence[Injection] = ()
    deaths: Sequence[Death] = ()
    checks: Sequence[Checked] = ()

    @property
    def may_reread(self) -> bool:
        """Whether something may have let sinks read records again."""
        return any(not REREADING.isdisjoint(one.parts) for one in self.injections) or any(
            one.part in REREADING for one in self.deaths
        )

    @property
    def not_happened(self) -> list[str]:
        """The faults that were selected, and that the run had no time for."""
        happened = {one.fault for one in self.injections if one.evidence}
        return [name for name in self.plan.faults if name not in happened]


class Folder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history_file = path / "history.jsonl"

    def write(self, name: str, content: Any) -> None:
        """Write a file for people and programs, whole or not at all."""
        self._write(name, [msgspec.json.format(msgspec.json.encode(content))])

    def write_seen(self, seen: Seen) -> None:
        """Write what was left. After hours that is much, so each event is a line, and nothing is indented."""
        encode = msgspec.json.Encoder().encode
        self._write("events.jsonl", (encode(event) + b"\n" for event in seen.events))
        self._write("seen.json", [encode(replace(seen, events=()))])

    def _write(self, name: str, parts: Iterable[bytes]) -> None:
        new = self.path / f"{name}.new"
        with new.open("wb") as file:
            file.writelines(parts)
        new.rename(self.path / name)

    @property
    def plan(self) -> Plan:
        return self._read("run.json", Plan)

    @property
    def history(self) -> History:
        """The requests. A client may have sent text that msgspec does not read, such as half of a surrogate pair."""
        with self._existing("history.jsonl").open(encoding="utf-8") as lines:
            return History(tuple(Attempt(**json.loads(line)) for line in lines))

    def record(self, domain: Domain) -> RunRecord:
        """All that is judged. Raises Failure if the run did not get so far."""
        with self._existing("events.jsonl").open("rb") as lines:
            events = [msgspec.json.decode(line, type=TopicEvent) for line in lines]
        return RunRecord(
            domain,
            self.plan,
            self.history,
            replace(self._read("seen.json", Seen), events=events),
            injections=self._read("injections.json", list[Injection]),
            deaths=self._read("deaths.json", list[Death]),
            checks=self._read("checks.json", list[Checked]),
        )

    def _read(self, name: str, kind: type[T]) -> T:
        return msgspec.json.decode(self._existing(name).read_bytes(), type=kind)

    def _existing(self, name: str) -> Path:
        file = self.path / name
        if not file.is_file():
            why = f"there is no {file}: the run did not get that far"
            raise Failure(why, "judge another run", code="soak-incomplete")
        return file
