"""Examples of docs/reference.md: what `outbox demo` sends, and who plays it; and the domain of `outbox soak`."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, cast

import pytest

from outbox import Settings
from outbox_lab.soak import Attempt, Domain, Effects, History, Refusal, Request, TopicEvent
from outbox_lab.walkthrough import (
    Phase,
    Player,
    Screen,
    SinkRole,
    SourceRole,
    Step,
    Story,
    Workload,
    client_config,
    connect,
    sink_specs,
)


class Movements:
    right = "dedup"  # the sink that agrees with the source under every fault
    naive = "naive"  # a sink that drifts; None if the project has none

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        self._item = str(uuid.uuid4())
        body = {"item_id": self._item, "quantity": 1, "unit": "KGM"}
        [self._first] = send([Request("first", "/movements", body, (201,), events=1)])

    def plan(self) -> Request:
        quantity = self._random.randint(-9, 9)
        body = {"item_id": self._item, "quantity": quantity, "unit": "KGM"}
        if quantity == 0:
            return Request("nothing", "/movements", body, (422,))
        return Request("movement", "/movements", body, (201,), events=1)


class Announcer(Player):
    def __init__(self) -> None:
        super().__init__()
        self.screen: Screen = Screen()
        self.told: list[str] = []

    def play(self, story: Story) -> None:
        for step in story.steps:
            self.told.append(step.title)
            self.screen.title(step.title)
            step.play()
        for phase in story.phases:
            self.screen.expect(phase.drift_right == 0, f"{phase.name}: no drift", str(phase.drift_right))


def test_a_workload() -> None:
    workload: Workload = Movements(seed=7)
    workload.set_up(lambda requests: [{"id": "1"} for _ in requests])
    assert {workload.plan().kind for _ in range(200)} == {"movement", "nothing"}


def test_a_player(capsys: pytest.CaptureFixture[str]) -> None:
    class OneStep:
        phases: Sequence[Phase] = ()
        steps = (Step("The end", lambda: None),)

    player = Announcer()
    player.play(cast(Story, OneStep()))
    assert player.told == ["The end"]
    assert "The end" in capsys.readouterr().out


def test_what_a_player_may_look_at(databases: Settings) -> None:
    source = connect(databases, SourceRole.AUDITOR)
    sinks = connect(databases, SinkRole.AUDITOR)
    with closing(source), closing(sinks), sinks.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM dead_letters")
        assert cursor.fetchone() == (0,)
    assert sink_specs(databases)["dedup"].topics == ["stock.item"]
    assert client_config(databases)["bootstrap.servers"] == databases.kafka_bootstrap


# The soak ------------------------------------------------------------------------------------------------------------


class SoakedMovements(Movements):
    sinks = (("dedup", "orders"), ("changes",))  # by process
    changes = "SELECT 'movement ' || (payload ->> 'movement_id'), 1 FROM outbox"
    invariants: Mapping[str, str] = {"no item has a negative version": "SELECT id::text FROM items WHERE version < 0"}

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


def test_a_domain_of_the_soak() -> None:
    domain: Domain = SoakedMovements(seed=7)
    domain.set_up(lambda requests: [{"id": "1"} for _ in requests])
    assert domain.plan().kind in ("movement", "nothing")


def test_what_the_domain_judges() -> None:
    sent = Attempt(
        0, "movement", "POST", "/movements", "key", {}, sent_s=0.0, ended_s=0.1, status=201, answer={"id": "m"}
    )
    event = TopicEvent("e", "stock.item", 0, 0, "i", "item.received.v1", 1, {"movement_id": "m"})
    domain = SoakedMovements(seed=7)
    assert domain.change_of_answer(sent.answer) == domain.change_of_event(event)
    assert [*domain.contradictions(History((sent,)), {"e": event})] == []
    assert len([*domain.contradictions(History((sent,)), {})]) == 1
