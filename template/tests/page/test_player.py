"""The player without a chain: one thing at a time, failures said, and every part shown as down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg2
import pytest
from outbox.base.errors import Failure
from outbox.base.settings import DatabaseUrl, Secret, Settings, load
from outbox.base.wait import wait_for
from outbox_lab.stack import ports
from outbox_lab.walkthrough import Chain, Story

from demo.page import player
from demo.page.actions import ACTIONS, Action
from demo.page.player import PagePlayer
from demo.page.probe import Probe
from demo.page.readings import Down
from template.tests.page.test_lesson import Told

SECRET = "a-password"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Of servers of which none answers."""
    [port] = ports.choose(0)
    return load(tmp_path, environment=False).replace(
        source_db_url=DatabaseUrl(port=port),
        sink_db_url=DatabaseUrl(port=port),
        source_db_auditor_password=Secret(SECRET),
        sink_db_auditor_password=Secret(SECRET),
        kafka_bootstrap=f"127.0.0.1:{port}",
        connect_url=f"http://127.0.0.1:{port}",
        service_bind=f"127.0.0.1:{port}",
    )


class Nowhere:
    """A chain of which nothing runs."""

    broker = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.starts = 0

    def start(self, _: object) -> None:
        self.starts += 1

    def sink_urls(self) -> list[str]:
        return [self.settings.connect_url]


@pytest.fixture
def story(settings: Settings) -> Told:
    told = Told()
    told.chain = cast(Chain, Nowhere(settings))
    told.workload = SimpleNamespace(right="balances", naive=None)
    return told


@pytest.fixture
def played(story: Told) -> Iterator[PagePlayer]:
    """A player that has played the story and waits."""
    made = PagePlayer()
    made.page = (ports.LOOPBACK, ports.choose(0)[0])
    made.play(cast(Story, story))
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(Failure, match="over"):
            made.wait()
        ended.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    yield made
    wait_for("the player to be free", lambda: made.ask("the end", _end), timeout_s=10)
    assert ended.wait(10)
    made.close()


def _end() -> None:
    raise Failure("over")


def said(made: PagePlayer) -> list[dict[str, Any]]:
    return list(made.hub.logs["said"])


def _has_said(made: PagePlayer, count: int) -> bool:
    return len(said(made)) == count


def test_the_story_is_played_and_the_address_is_on_the_terminal(
    capsys: pytest.CaptureFixture[str], played: PagePlayer, story: Told
) -> None:
    assert story.played == list(range(6))
    assert f"http://127.0.0.1:{played.server and played.server.port}/#token=" in capsys.readouterr().out


def test_one_thing_is_done_at_a_time(played: PagePlayer, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> str:
        begun.set()
        assert go_on.wait(10)
        return "Done."

    monkeypatch.setitem(ACTIONS, "burst", Action("Slow", "", "traffic", slow))
    wait_for("the first action to be taken", lambda: played.act("burst"), timeout_s=10)
    assert begun.wait(10)
    assert played.hub.part("stage")["busy"] == "Slow"
    assert not played.act("transfer")
    assert not played.lesson("play")
    go_on.set()
    wait_for("the action", lambda: [one["text"] for one in said(played)] == ["Done."], timeout_s=10)


def test_an_action_that_fails_says_so_and_the_next_one_works(played: PagePlayer) -> None:
    for number in (1, 2):
        wait_for("the action to be taken", lambda: played.act("transfer"), timeout_s=10)  # no service answers
        wait_for("the failure", partial(_has_said, played, number), timeout_s=10)
    assert {one["kind"] for one in said(played)} == {"failed"}


def test_an_unexpected_error_of_an_action_does_not_end_the_demo(
    played: PagePlayer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> str:
        raise psycopg2.OperationalError(SECRET)

    monkeypatch.setitem(ACTIONS, "burst", Action("Broken", "", "traffic", broken))
    for number in (1, 2):
        wait_for("the action to be taken", lambda: played.act("burst"), timeout_s=10)
        wait_for("the failure", partial(_has_said, played, number), timeout_s=10)
    assert {one["kind"] for one in said(played)} == {"failed"}
    assert "OperationalError" in said(played)[0]["text"]
    assert SECRET not in said(played)[0]["text"]
    assert len(caplog.records) == 2


def test_what_this_chain_cannot_do_is_not_offered_and_is_refused(played: PagePlayer) -> None:
    lacks = {one["name"]: one["lacks"] for one in played.hub.part("stage")["actions"]}
    assert lacks.keys() == ACTIONS.keys()
    assert lacks["stop-kafka"]  # why: its process is out of reach
    assert lacks["rewind-naive"]
    assert lacks["transfer"] is None
    wait_for("the player to be free", lambda: played.is_free, timeout_s=10)
    assert not played.act("stop-kafka")
    assert played.is_free
    for ask in (played.act, played.lesson):
        with pytest.raises(KeyError):
            ask("nothing")


def test_a_lesson_that_fails_is_stopped_and_the_chain_is_repaired(
    played: PagePlayer, story: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Told(fails_at=2)
    monkeypatch.setattr(player, "Story", lambda *_: again)
    wait_for("the lesson to be taken", lambda: played.lesson("play"), timeout_s=10)
    wait_for("the first question", lambda: played.lesson("resume") or bool(again.played), timeout_s=10)
    wait_for("the repair", lambda: story.chain.starts == 1, timeout_s=10)
    assert again.is_stopped
    assert not story.is_stopped


def test_every_part_is_down_with_a_reason_and_without_a_secret(story: Told) -> None:
    probe = Probe(story.chain)
    readings = probe.read()
    probe.close()
    parts = (readings.source, readings.slot, readings.connector, readings.topics, readings.sinks, readings.health)
    for part in parts:
        assert isinstance(part, Down)
        assert part.reason
        assert SECRET not in part.reason
