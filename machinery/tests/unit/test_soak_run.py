"""A run that breaks off: it is stopped, and says what is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox_lab.soak import run
from outbox_lab.soak.domain import Options
from outbox_lab.soak.faults import FAULTS
from outbox_lab.soak.history import Checked, Problem
from outbox_lab.soak.record import Folder, Plan

PLAN = Plan(1, 60.0, 30.0, 5.0, exactly_once=True, faults=["kafka-killed"])
LOST = Checked("before sink-rewound", problems=[Problem("events-lost", "1 event lost")])


class Domain:
    """Nothing is asked of it before the run breaks off."""

    sinks = (("orders",),)


class Testbed:
    """A testbed that cannot be started."""

    __test__ = False
    error: BaseException
    is_stopped = False

    def __init__(self, settings: Settings, sinks: Sequence[Sequence[str]], options: Options) -> None:
        del sinks, options
        self.settings = settings
        self.checks = [LOST]

    def start(self, report: Callable[[str], None]) -> None:
        del report
        raise self.error

    def stop(self) -> None:
        type(self).is_stopped = True


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a run whose start raises this, and which says something to a list."""
    monkeypatch.setattr(run, "Testbed", Testbed)
    monkeypatch.setattr(Testbed, "is_stopped", False)

    def make(error: BaseException, said: list[str], *names: str) -> Any:
        monkeypatch.setattr(Testbed, "error", error, raising=False)
        domain: Any = Domain()
        faults = {name: FAULTS[name] for name in names}
        return run.soak(load(tmp_path, environment=False), domain, PLAN, faults, Folder(tmp_path), said.append)

    return make


def test_a_run_that_breaks_off_is_stopped_and_judged_by_what_there_is(made: Callable[..., Any], tmp_path: Path) -> None:
    found = made(Failure("Kafka is unavailable"), [])
    assert (found.result, found.why_unknown) == ("invalid", "Kafka is unavailable"), "a check has found a loss before"
    assert Testbed.is_stopped
    assert json.loads((tmp_path / "verdict.json").read_text())["result"] == "invalid"
    assert LOST.when in (tmp_path / "checks.json").read_text()


def test_a_run_that_is_interrupted_is_stopped_and_says_so(made: Callable[..., Any], tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        made(KeyboardInterrupt(), said)
    assert "interrupted" in said[-1]
    assert Testbed.is_stopped
    assert not (tmp_path / "verdict.json").exists()
