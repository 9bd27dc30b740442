"""Examples of docs/reference.md: what `outbox demo` sends, and who plays it."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, cast

import pytest

from outbox import Settings
from outbox_lab.walkthrough import (
    Phase,
    Player,
    Request,
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
