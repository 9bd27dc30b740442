"""A sound run of the soak, written by hand: two orders with three events, a refusal, and an unknown outcome."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType
from typing import Any

from outbox.sink.comparison_files import AddsLine
from outbox_lab.soak.history import (
    Attempt,
    ComparedTotals,
    History,
    Injection,
    Seen,
    Sink,
    Source,
    StoredAnswer,
    TopicEvent,
)
from outbox_lab.soak.record import Plan, RunRecord
from outbox_lab.soak.verdict import judge

OK, REFUSED, BROKEN = 201, 409, 503


class Domain:
    """Orders: order N has the key `key-N`, and one event for each of its lines."""

    sinks = (("totals",),)
    changes = ""
    invariants: Mapping[str, str] = MappingProxyType({})

    def change_of_answer(self, body: Any) -> str:
        return f"order {body['id']}"

    def change_of_event(self, event: TopicEvent) -> str:
        return f"order {event.data['order']}"

    def contradictions(self, history: History, events: dict[str, TopicEvent]) -> list[str]:
        known = {event.data["order"] for event in events.values()}
        return [read.path for read in history.reads if read.outcome == "failed" or read.answer["id"] not in known]


def attempt(number: int, status: int | None = OK, answer: Any = None, method: str = "POST") -> Attempt:
    key = f"key-{number}" if method == "POST" else None
    body = {"id": number} if answer is None and status == OK else answer
    return Attempt(0, "order", method, f"/orders/{number}", key, None, 0.0, 1.0, status, body)


def stored(number: int, status: int = OK) -> StoredAnswer:
    return StoredAnswer(f"key-{number}", status, {"id": number})


def event(
    number: int, version: int, offset: int, *, order_number: int = 1, key: str = "a", pieces: int = 0
) -> TopicEvent:
    data, numbers = {"order": order_number, "pieces": pieces}, {"pieces": Decimal(pieces)}
    return TopicEvent(f"event-{number}", "orders", 0, offset, key, "order.placed.v1", version, data, numbers)


EVENTS = (event(1, 1, 0, pieces=5), event(2, 2, 1, pieces=7), event(3, 3, 3, order_number=2, pieces=1))
ADDS = {"order.placed.v1": AddsLine(1, "pieces")}
DUE = {"a": Decimal(13)}
VERSIONS = {"a": 3}
ROWS = {"event-1": 1, "event-2": 1, "event-3": 1}
SOURCE = Source([stored(1), stored(2)], {"order 1": 2, "order 2": 1}, frozenset({"event-2", "event-3"}))
SEEN = Seen(EVENTS, SOURCE, [Sink("totals", comparisons=[ComparedTotals("totals", DUE, DUE, ADDS, VERSIONS)])])
SOLD_OUT = {"title": "sold out"}
READ = attempt(1, method="GET")
HISTORY = History((attempt(1), READ, attempt(2), attempt(3, REFUSED, SOLD_OUT), attempt(4, None)))
PLAN = Plan(1, 60.0, 30.0, 5.0, exactly_once=True, faults=[])
KILLED = Injection(
    "kafka-killed",
    "process 7 was killed",
    is_healed=True,
    fired_s=10.0,
    healed_s=20.0,
    parts=("kafka",),  # so sinks may have read records again
)


def record(seen: Seen = SEEN, history: History = HISTORY, plan: Plan = PLAN, **more: Any) -> RunRecord:
    """The record of a sound run with a fault, perhaps with something else in it."""
    return RunRecord(Domain(), plan, history, seen, **{"injections": [KILLED], **more})  # type: ignore[arg-type]


def broken(run: RunRecord) -> dict[str, int]:
    """The promises that do not hold, with the number of cases."""
    return {one.promise: one.cases for one in judge(run).findings}
