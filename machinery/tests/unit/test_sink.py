"""Sinks before they run: declarations of jobs and their refusals, the command, and identities of dead letters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.records import Record
from outbox.sink.running import supervisor
from outbox.sink.spec import SinkJob, SinkSpec
from outbox_lab.testing.failures import raises
from tests import targets
from tests.support import made_events
from tests.support.declared import Events, payload
from tests.support.declared_sinks import decoders

EVENT_ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"
PACKAGE = "sinks_of_a_test"
IMPORTS = "from pathlib import Path\nfrom outbox.sinks import LakehouseTarget, SinkJob\n"
FUNCTION = "tests.targets:write"
Declare = Callable[[str], list[SinkJob]]


def resolve(job: SinkJob = made_events.JOB, **changes: Any) -> SinkSpec:
    return discovery.resolve(settings.load(environment=False), replace(job, **changes))


class TestCommand:
    """`outbox sink`: which sinks it runs."""

    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names of the sinks that were run, in a project that runs two."""
        names: list[str] = []

        def run(_: Settings, specs: Sequence[SinkSpec], unusable: Mapping[str, Failure], **__: bool) -> None:
            names.extend([*(one.name for one in specs), *(f"not {name}" for name in unusable)])

        monkeypatch.setattr(supervisor, "run", run)
        self.choose(monkeypatch, "upsert", "dedup")
        return names

    @staticmethod
    def choose(monkeypatch: pytest.MonkeyPatch, *sinks: str) -> None:
        """Let the project run these sinks."""
        mine = replace(project.current(), sinks=sinks)
        monkeypatch.setattr(project, "current", lambda: mine)

    @pytest.mark.parametrize(
        ("words", "names"), [([], ["upsert", "dedup"]), (["merge", "naive", "merge"], ["merge", "naive"])]
    )
    def test_it_runs_the_given_ones_or_those_of_the_project(
        self, ran: list[str], words: list[str], names: list[str]
    ) -> None:
        assert CliRunner().invoke(sink, words).exit_code == 0
        assert ran == names

    def test_one_that_cannot_run_does_not_stop_the_others(
        self, ran: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bad = replace(made_events.JOB, name="bad", events=["order.lost"])
        known = discovery.jobs(settings.load(environment=False))
        monkeypatch.setattr(discovery, "jobs", lambda _: [bad, *known])
        assert CliRunner().invoke(sink, ["bad", "dedup"]).exit_code == 0
        assert ran == ["dedup", "not bad"]
        assert isinstance(CliRunner().invoke(sink, ["bad"]).exception, Failure)
        assert ran == ["dedup", "not bad"]

    @pytest.mark.parametrize(
        ("sinks", "parts"),
        [(["dedup", "nonsense"], ["called nonsense", "there are", "upsert"]), ([], ["no sink is named", "sinks = ["])],
    )
    def test_a_project_that_names_an_unknown_one_or_none_is_refused(
        self, ran: list[str], monkeypatch: pytest.MonkeyPatch, sinks: list[str], parts: list[str]
    ) -> None:
        self.choose(monkeypatch, *sinks)
        with raises("sink-unknown" if sinks else "failed", *parts):
            CliRunner().invoke(sink, [], catch_exceptions=False)
        assert ran == []


class TestJobs:
    """Declarations that a job may have."""

    def test_an_event_stands_for_its_topic(self) -> None:
        assert resolve(events=["order.placed", "item"]).topics == ["stock.item", "stock.order"]

    @pytest.mark.parametrize(
        ("changes", "code", "part"),
        [
            *(({"name": name}, "sink-unusable", "not a word") for name in ("", "Stock", "a.rebuild", "a" * 41, "a\n")),
            ({"events": []}, "sink-unusable", "it takes no events"),
            ({"decoders": made_events.MAIN.decoders}, "sink-unusable", "it takes no events"),
            ({"events": "order"}, "sink-unusable", "events=['order']"),
            *(
                ({"events": ["item", name]}, "event-undeclared", name)
                for name in ("orders", "item.lost", "order.placed.v3", "order.placed.v1.v1")
            ),
            ({"strategy": "best"}, "strategy-unusable", "best"),
            ({"strategy": Path("missing.sql")}, "strategy-unusable", "missing.sql"),
            ({"target": "tests.targets.write"}, "sink-unusable", "tests.targets.write"),
            ({"target": targets.write}, "sink-unusable", "package.module:function"),
            ({"target": FunctionTarget}, "sink-unusable", "package.module:function"),
            ({"transform": targets.write}, "sink-unusable", "package.module:function"),
        ],
    )
    def test_a_declaration_that_cannot_be_used_is_refused(self, changes: dict[str, Any], code: str, part: str) -> None:
        with raises(code, part):
            resolve(**changes)

    @pytest.mark.parametrize("by", ["upsert", "versions"])
    def test_strategies_that_need_versions_refuse_events_without(self, tmp_path: Path, by: str) -> None:
        known = Events(tmp_path).aggregate("order", 'key = "id"\n', placed_v1=payload()).load()
        with raises("sink-unusable", by, "numbered by key"):
            resolve(events=[], decoders=decoders(known, "order"), strategy=by)

    def test_two_jobs_of_one_name_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "jobs", lambda _: [made_events.JOB, replace(made_events.JOB, events=["order"])])
        with raises("sink-unusable", made_events.JOB.name):
            discovery.sinks(settings.load(environment=False))

    def test_a_sink_by_another_strategy_has_a_name_of_its_own(self) -> None:
        assert made_events.JOB.by("merge").name == f"{made_events.JOB.name}-merge"
        with raises("sink-unusable", "needs its name"):
            SinkJob(events=["order"]).by("merge")


class TestFunctionTargets:
    """A job whose target is a function is refused before the start if the function cannot be used."""

    @staticmethod
    def require_usable(**changes: Any) -> None:
        spec = resolve(SinkJob("writes", Path("none"), target=FUNCTION, events=["order"]), **changes)
        spec.target.require_usable(spec)

    def test_one_that_can_be_imported_is_taken(self) -> None:
        self.require_usable()

    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            ({"strategy": "merge"}, "merge"),
            ({"target": "tests.missing:write"}, "tests.missing"),
            ({"projections": made_events.PROJECTIONS}, ".sql"),
        ],
    )
    def test_one_that_cannot_be_used_is_refused(self, changes: dict[str, Any], part: str) -> None:
        with raises("sink-unusable", part):
            self.require_usable(**changes)

    def test_one_without_pyarrow_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with raises("package-missing", "pyarrow"):
            self.require_usable()


class TestModules:
    """The module ``job`` of a subpackage: the defaults that it gives, and what it must declare."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The subpackage `orders` of a project's sinks."""
        return tmp_path / PACKAGE / "orders"

    @pytest.fixture
    def declare(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
        """The jobs of the project whose only module ``job`` has these lines."""
        mine = replace(project.current(), sinks_package=PACKAGE, handlers="handlers_of_a_test")
        monkeypatch.setattr(project, "current", lambda: mine)
        monkeypatch.syspath_prepend(tmp_path)
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()

        def jobs(lines: str) -> list[SinkJob]:
            (folder / "job.py").write_text(IMPORTS + lines)
            return discovery.jobs(settings.load(environment=False))

        yield jobs
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]

    def test_a_job_that_names_its_events_only_gets_the_rest_of_its_subpackage(
        self, declare: Declare, folder: Path
    ) -> None:
        (job,) = declare('job = SinkJob(events=["order"])')
        assert (job.name, job.projections, job.strategy) == ("orders", folder / "projections", "dedup")
        assert isinstance(resolve(job).target, PostgresTarget)

    def test_what_a_job_names_stays_and_its_paths_begin_at_the_subpackage(self, declare: Declare, folder: Path) -> None:
        (job,) = declare(
            'job = SinkJob(name="mine", events=["order"], strategy=Path("mine.sql"), projections=Path("../others"), '
            'target=LakehouseTarget(schema=Path("table.sql"), totals=Path("totals.sql")))'
        )
        assert (job.name, job.strategy, job.projections) == ("mine", folder / "mine.sql", folder.parent / "others")
        assert isinstance(job.target, LakehouseTarget)
        assert vars(job.target) == vars(LakehouseTarget(schema=folder / "table.sql", totals=folder / "totals.sql"))

    @pytest.mark.parametrize(
        ("value", "names"),
        [("[first, first.by('merge')]", ["first", "first-merge"]), ("[]", []), ("(first,)", ["first"])],
    )
    def test_several_jobs_or_none_are_a_list_or_what_a_function_returns(
        self, declare: Declare, value: str, names: list[str]
    ) -> None:
        first = 'first = SinkJob(name="first", events=["order"])\n'
        for lines in (f"jobs = {value}", f"def jobs(settings): return {value}"):
            assert [job.name for job in declare(first + lines)] == names

    @pytest.mark.parametrize(
        "lines",
        [
            "",
            'job = ["order"]',
            'jobs = SinkJob(events=["order"])',
            'jobs = ["order"]',
            "def jobs(settings): pass",
            'job = SinkJob(events=["order"])\njobs = [job]',
        ],
    )
    def test_a_module_without_a_usable_declaration_is_refused(self, declare: Declare, lines: str) -> None:
        with raises("sink-unusable", f"{PACKAGE}.orders.job"):
            declare(lines)


class TestIdentity:
    """The identity of a dead letter."""

    @staticmethod
    def identity(event_id: str | None = None, **changes: Any) -> str:
        record = Record(key=b"k", headers=[("a", b"1"), ("b", None)], value=b"v", recorded_ms=0)
        return dead_records.identity(record._replace(**changes), event_id)

    def test_is_the_event_id_or_the_same_for_the_same_record(self) -> None:
        assert self.identity(EVENT_ID) == EVENT_ID
        assert self.identity() == self.identity(recorded_ms=1)

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
        assert self.identity(**changes) != self.identity()
