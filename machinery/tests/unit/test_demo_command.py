"""The end of `outbox demo`: the chain is torn down, whatever the player does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from outbox_lab.commands import demo
from outbox_lab.walkthrough import player, workload
from outbox_lab.walkthrough.player import Player


class Careless(Player):
    """A player that cannot end what it started."""

    def play(self, story: object) -> None:
        pass

    def close(self) -> None:
        raise RuntimeError("a thread hangs")


@pytest.fixture
def handlers() -> Iterator[None]:
    """The signal handlers of this process, which the command sets."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


@pytest.mark.usefixtures("handlers")
def test_the_chain_is_torn_down_when_the_player_cannot_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    story = SimpleNamespace(tear_down=lambda: ended.append("the chain"))
    monkeypatch.setattr(player, "load", Careless)
    monkeypatch.setattr(workload, "load", lambda _: SimpleNamespace())
    monkeypatch.setattr(demo, "_processes", lambda *_: SimpleNamespace())
    monkeypatch.setattr(demo, "Story", lambda *_: story)
    with pytest.raises(RuntimeError, match="hangs"):
        demo.demo.main(["--once"], standalone_mode=False)
    assert ended == ["the chain"]
