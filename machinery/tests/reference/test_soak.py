"""Examples of docs/reference.md: the domain of `outbox soak`."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from outbox_lab.soak import Attempt, Domain, Effects, History, Refusal, Request, TopicEvent


class Movements:
    right, naive = "dedup", None
    sinks = (("dedup", "orders"), ("changes",))  # by process
    changes = "SELECT 'movement ' || (payload ->> 'movement_id'), 1 FROM outbox"
    invariants: Mapping[str, str] = {"no item has a negative version": "SELECT id::text FROM items WHERE version < 0"}

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        self._item = str(uuid.uuid4())
        send([Request("first", "/movements", {"item_id": self._item, "quantity": 1, "unit": "KGM"}, (201,), events=1)])

    def plan(self) -> Request:
        body = {"item_id": self._item, "quantity": self._random.randint(1, 9), "unit": "KGM"}
        return Request("movement", "/movements", body, (201,), events=1)

    def change_of_answer(self, body: Any) -> str:
        return f"movement {body['id']}"

    def change_of_event(self, event: TopicEvent) -> str:
        return f"movement {event.data['movement_id']}"

    # What follows is optional.

    refusals: Mapping[str, Refusal] = {
        "dedup": Refusal(
            "unit mismatch",
            begin="UPDATE stock SET unit = 'XXX' WHERE sink = 'dedup'",
            end="UPDATE stock SET unit = 'KGM' WHERE sink = 'dedup'",
        )
    }
    plain = ("versions",)
    handlers: Mapping[str, Effects] = {
        "item_receipts": Effects(
            "handled_events",
            query="SELECT key, event_id::text FROM handled_events WHERE handler = 'item_receipts' ORDER BY key, place",
        )
    }

    def contradictions(self, history: History, events: Mapping[str, TopicEvent]) -> Iterable[str]:
        made = {event.data["movement_id"] for event in events.values()}
        for operation in history.operations.values():
            for status, answer in operation.answers:
                if status == 201 and answer["id"] not in made:
                    yield f"movement {answer['id']} was acknowledged and has no event"


def test_a_domain() -> None:
    domain: Domain = Movements(seed=7)
    domain.set_up(lambda _: [])
    assert domain.plan().kind == "movement"


def test_what_it_judges() -> None:
    sent = Attempt(
        0, "movement", "POST", "/movements", "key", {}, sent_s=0.0, ended_s=0.1, status=201, answer={"id": "m"}
    )
    event = TopicEvent("e", "stock.item", 0, 0, "i", "item.received.v1", 1, {"movement_id": "m"})
    domain = Movements(seed=7)
    assert domain.change_of_answer(sent.answer) == domain.change_of_event(event)
    assert [*domain.contradictions(History((sent,)), {"e": event})] == []
    assert len([*domain.contradictions(History((sent,)), {})]) == 1
