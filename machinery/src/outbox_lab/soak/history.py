"""The history of a run: each request that a client has sent, and its answer.

One line of JSON an attempt, written when it ends. A client without an answer may repeat its request with the same
Idempotency-Key: that is another attempt of the same operation.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "failed", "unknown"]
SET_UP = -1  # the client that creates what the others use


@dataclass(frozen=True, slots=True)
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
    expected: Sequence[int] = ()  # the statuses that the domain lets the service answer; empty if it does not say

    @property
    def outcome(self) -> Outcome:
        """``ok`` and ``failed`` are definite. The service answers 5xx when it does not know, as on a broken commit."""
        if self.status is None or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return "unknown"
        return "ok" if self.status < HTTPStatus.BAD_REQUEST else "failed"

    @property
    def request(self) -> tuple[str, str, Any]:
        """The request, which is the same in all attempts of an operation."""
        return self.method, self.path, self.body


@dataclass(frozen=True)
class Operation:
    """All attempts with one key and one request, in the order in which they ended."""

    key: str
    attempts: tuple[Attempt, ...]

    @property
    def outcome(self) -> Outcome:
        """The outcome of its first definite attempt; ``unknown`` without any."""
        return next((one.outcome for one in self.attempts if one.outcome != "unknown"), "unknown")

    @property
    def answers(self) -> list[tuple[int, Any]]:
        """The definite answers of the operation, each once."""
        found: list[tuple[int, Any]] = []
        for one in self.attempts:
            if one.status is not None and one.outcome != "unknown" and (one.status, one.answer) not in found:
                found.append((one.status, one.answer))
        return found

    @property
    def acknowledged_s(self) -> float | None:
        """When a client was first told that the change is made; None if nobody was."""
        return next((one.ended_s for one in self.attempts if one.outcome == "ok"), None)


@dataclass(frozen=True)
class History:
    """The attempts of a run."""

    attempts: tuple[Attempt, ...] = ()

    @cached_property
    def operations(self) -> Mapping[str, Operation]:
        """By key, the changes that clients asked for. An attempt that uses a key again is in `misuses`."""
        return {key: Operation(key, tuple(attempts)) for key, attempts in self._by_key[0].items()}

    @cached_property
    def misuses(self) -> list[Attempt]:
        """The attempts with a key that another request had before. The service must refuse them."""
        return self._by_key[1]

    @cached_property
    def _by_key(self) -> tuple[dict[str, list[Attempt]], list[Attempt]]:
        by_key: dict[str, list[Attempt]] = {}
        misuses: list[Attempt] = []
        for one in self.attempts:
            if one.key is not None:
                earlier = by_key.setdefault(one.key, [])
                is_same = not earlier or earlier[0].request == one.request
                (earlier if is_same else misuses).append(one)
        return by_key, misuses

    @property
    def reads(self) -> Iterator[Attempt]:
        """The reads with a definite answer, also those that the service has refused, for example with 404."""
        return (one for one in self.attempts if one.method == "GET" and one.outcome != "unknown")


class Recorder:
    """Writes a history while it happens. Several threads may use it."""

    def __init__(self, file: Path) -> None:
        self._file = file.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self.outcomes: Counter[Outcome] = Counter()  # of the attempts so far
        self.acknowledged = 0
        """How many of them were changes that the service has acknowledged."""

    def add(self, attempt: Attempt) -> None:
        """Write an attempt, in the order in which they end."""
        line = json.dumps(asdict(attempt))
        with self._lock:
            self._file.write(line + "\n")
            self.outcomes[attempt.outcome] += 1
            self.acknowledged += attempt.key is not None and attempt.outcome == "ok"

    def close(self) -> None:
        """End the history."""
        self._file.close()


def read(lines: Iterable[str]) -> History:
    """The history in these lines."""
    return History(tuple(Attempt(**json.loads(line)) for line in lines))
