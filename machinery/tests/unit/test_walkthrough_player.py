"""The player of the walkthrough, the terminal's or one that the project names, and the end of the command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outbox.base import project
from outbox_lab.commands import demo
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import player, workload
from outbox_lab.walkthrough.player import Player


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the project name a player."""
    ours = replace(project.current(), player=name)
    monkeypatch.setattr(project, "current", lambda: ours)


def test_by_default_the_terminal_plays() -> None:
    assert type(player.load()) is Player


def test_a_project_may_name_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theatre.py").write_text("from outbox_lab.walkthrough import Player\nclass Actor(Player): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named(monkeypatch, "theatre:Actor")
    loaded = player.load()
    assert type(loaded).__name__ == "Actor"
    assert loaded.screen.failed is None


@pytest.mark.parametrize("name", ["nowhere:Player", "nowhere.stage.actors:Player"])
def test_without_the_folder_of_the_player_the_terminal_plays(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named(monkeypatch, name)
    assert type(player.load()) is Player
    assert "nowhere" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["outbox:Nothing", "outbox", "broken:Player"])
def test_one_that_cannot_be_made_is_a_failure(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    named(monkeypatch, name)
    with raises("player-missing", "[tool.outbox]"):
        player.load()


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
    monkeypatch.setattr(demo, "chain_of_processes", lambda *_: SimpleNamespace())
    monkeypatch.setattr("outbox_lab.walkthrough.story.Story", lambda *_: story)
    with pytest.raises(RuntimeError, match="hangs"):
        demo.demo.main(["--once"], standalone_mode=False)
    assert ended == ["the chain"]
