"""The history of a run: each request that a client has sent, and what came of it.

One line of JSON an attempt, written when it ends. A client that gets no answer may repeat its request with the same
Idempotency-Key: that is another attempt of the same operation.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "failed", "unknown"]


@dataclass(frozen=True)
class Attempt:
    """A request of a client, sent once. Times are seconds since the run began."""

    client: int
    kind: str
    method: str
    path: str
    key: str | None  # its Idempotency-Key; None for a read, and for a request that is sent without one
    body: Any
    sent_s: float
    ended_s: float
    status: int | None = None  # None without an answer
    answer: Any = None  # the JSON of the answer; None if it is not JSON

    @property
    def outcome(self) -> Outcome:
        """``ok`` and ``failed`` are definite. The service answers 5xx when it does not know, as on a broken commit."""
        if self.status is None or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return "unknown"
        return "ok" if self.status < HTTPStatus.BAD_REQUEST else "failed"


@dataclass(frozen=True)
class Operation:
    """All attempts with one key, in the order in which they ended."""

    key: str
    attempts: tuple[Attempt, ...]

    @property
    def outcome(self) -> Outcome:
        """That of its definite attempts; ``unknown`` if there is none. Those that contradict each other are a finding
        of the checker `answers`; here the first one counts.
        """
        return next((one.outcome for one in self.attempts if one.outcome != "unknown"), "unknown")

    @property
    def answers(self) -> list[tuple[int, Any]]:
        """Its definite answers, each once."""
        found: list[tuple[int, Any]] = []
        for one in self.attempts:
            if one.status is not None and one.outcome != "unknown" and (one.status, one.answer) not in found:
                found.append((one.status, one.answer))
        return found


@dataclass(frozen=True)
class History:
    """The attempts of a run."""

    attempts: tuple[Attempt, ...] = ()

    @cached_property
    def operations(self) -> Mapping[str, Operation]:
        """By key, what clients wanted to change."""
        by_key: dict[str, list[Attempt]] = {}
        for one in self.attempts:
            if one.key is not None:
                by_key.setdefault(one.key, []).append(one)
        return {key: Operation(key, tuple(attempts)) for key, attempts in by_key.items()}

    @property
    def reads(self) -> Iterator[Attempt]:
        """The reads that got an answer."""
        return (one for one in self.attempts if one.method == "GET" and one.outcome == "ok")


class Recorder:
    """Writes a history while it happens. Several threads may use it."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, attempt: Attempt) -> None:
        """Write an attempt, in the order in which they end."""
        line = json.dumps(asdict(attempt))
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        """End the history."""
        self._file.close()


def read(lines: Iterable[str]) -> History:
    """The history in these lines."""
    return History(tuple(Attempt(**json.loads(line)) for line in lines))
