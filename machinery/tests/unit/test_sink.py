"""The sink's parts that need no server: strategy files, identities of dead letters, positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outbox.base import project, settings
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.commands.sink import sink
from outbox.sink import discovery
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.records import Record
from outbox.sink.running import supervisor
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.failures import raises
from tests.support import made_events
from tests.support.declared import Events, payload
from tests.support.declared_sinks import decoders

EVENT_ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"


def identity(event_id: str | None = None, **changes: Any) -> str:
    """The identity of a dead letter."""
    record = Record(key=b"k", headers=[("a", b"1"), ("b", None)], value=b"v", recorded_ms=0)
    return dead_records.identity(record._replace(**changes), event_id)


class TestCommand:
    """`outbox sink`: which sinks it runs."""

    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the sinks that were run, in a project that runs two."""
        names: list[str] = []

        def run(_: Settings, specs: Sequence[SinkSpec], unusable: Mapping[str, Failure], **__: bool) -> None:
            names.extend([*(one.name for one in specs), *(f"not {name}" for name in unusable)])

        monkeypatch.setattr(supervisor, "run", run)
        mine = replace(project.current(), sinks=("upsert", "dedup"))
        monkeypatch.setattr(project, "current", lambda: mine)
        return names

    @pytest.mark.parametrize(
        ("words", "names"), [([], ["upsert", "dedup"]), (["merge", "naive", "merge"], ["merge", "naive"])]
    )
    def test_it_runs_the_given_ones_or_those_of_the_project(
        self, ran: list[str], words: list[str], names: list[str]
    ) -> None:
        assert CliRunner().invoke(sink, words).exit_code == 0
        assert ran == names

    @pytest.mark.parametrize("changes", [{"events": ["order.lost"]}, {"projections": Path("nowhere")}])
    def test_one_that_cannot_run_does_not_stop_the_others(
        self, ran: list[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        bad = replace(made_events.JOB, name="bad", **changes)
        known = discovery.jobs(settings.load(environment=False))
        monkeypatch.setattr(discovery, "jobs", lambda _: [bad, *known])
        assert CliRunner().invoke(sink, ["bad", "dedup"]).exit_code == 0
        assert ran == ["dedup", "not bad"]
        ran.clear()
        assert CliRunner().invoke(sink, ["dedup"]).exit_code == 0
        assert ran == ["dedup"]
        assert isinstance(CliRunner().invoke(sink, ["bad"]).exception, Failure)
        assert ran == ["dedup"]

    def test_an_unknown_one_of_the_project_is_refused(self, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        mine = replace(project.current(), sinks=("dedup", "nonsense"))
        monkeypatch.setattr(project, "current", lambda: mine)
        with raises("sink-unknown", "called nonsense", "there are", "upsert"):
            CliRunner().invoke(sink, [], catch_exceptions=False)
        assert ran == []

    def test_without_any_the_remedy_is_named(self, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        mine = replace(project.current(), sinks=())
        monkeypatch.setattr(project, "current", lambda: mine)
        with raises("failed", "no sink is named", "sinks = ["):
            CliRunner().invoke(sink, [], catch_exceptions=False)
        assert ran == []


class TestJobs:
    """Declarations that a job may have."""

    def resolve(self, **changes: Any) -> SinkSpec:
        return discovery.resolve(settings.load(environment=False), replace(made_events.JOB, **changes))

    def test_an_event_stands_for_its_topic(self) -> None:
        assert self.resolve(events=["order.placed", "item"]).topics == ["stock.item", "stock.order"]

    @pytest.mark.parametrize("name", ["", "Stock", "1st", "a/b", "a.rebuild", "a" * 41, "a\n"])
    def test_a_name_that_is_no_word_is_refused(self, name: str) -> None:
        with raises("sink-unusable", "its name is not a word"):
            self.resolve(name=name)

    def test_a_job_takes_events_or_has_decoders(self) -> None:
        wrong: list[dict[str, Any]] = [{"events": []}, {"decoders": made_events.MAIN.decoders}]
        for changes in wrong:
            with raises("sink-unusable", "it takes no events"):
                self.resolve(**changes)

    @pytest.mark.parametrize("name", ["orders", "item.lost", "order.placed.v3", "order.placed.v1.v1"])
    def test_an_event_that_is_not_declared_is_refused(self, name: str) -> None:
        with raises("event-undeclared", name):
            self.resolve(events=["item", name])

    def test_an_unknown_strategy_is_refused(self, tmp_path: Path) -> None:
        for one in ("best", tmp_path / "mine.sql"):
            with raises("strategy-unusable"):
                self.resolve(strategy=one)

    @pytest.mark.parametrize("by", ["upsert", "versions"])
    def test_strategies_that_need_versions_refuse_events_without(self, tmp_path: Path, by: str) -> None:
        events = Events(tmp_path)
        events.aggregate("order", 'key = "id"\n', placed_v1=payload())
        found = decoders(events.load(), "order")
        with raises("sink-unusable", by, "numbered by key"):
            self.resolve(events=[], decoders=found, strategy=by)

    def test_two_jobs_of_one_name_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "jobs", lambda _: [made_events.JOB, replace(made_events.JOB, events=["order"])])
        with raises("sink-unusable", made_events.JOB.name):
            discovery.sinks(settings.load(environment=False))

    def test_a_sink_by_another_strategy_has_a_name_of_its_own(self) -> None:
        assert made_events.JOB.by("merge").name == f"{made_events.JOB.name}-merge"


class TestIdentity:
    def test_is_the_event_id_if_there_is_one(self) -> None:
        assert identity(EVENT_ID) == EVENT_ID

    def test_is_the_same_for_the_same_record(self) -> None:
        assert identity() == identity(recorded_ms=1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"key": None},
            {"key": b""},
            {"key": b"kv", "value": b""},
            {"value": None},
            {"headers": []},
            {"headers": [("a", b"1"), ("b", b"")]},
            {"headers": [("a1", b""), ("b", None)]},
        ],
    )
    def test_differs_where_anything_differs(self, changes: dict[str, Any]) -> None:
        assert identity(**changes) != identity()
