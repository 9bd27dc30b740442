"""Declarations of a module ``job``: which defaults its subpackage gives, and which declarations are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from outbox.base import project, settings
from outbox.sink import discovery
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.spec import SinkJob
from outbox_lab.testing.failures import raises
from tests import targets

PACKAGE = "sinks_of_a_test"
IMPORTS = "from pathlib import Path\nfrom outbox.sinks import LakehouseTarget, SinkJob\n"
Declare = Callable[[str], list[SinkJob]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The subpackage `orders` of a project's sinks."""
    return tmp_path / PACKAGE / "orders"


@pytest.fixture
def declare(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
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


def test_job_without_a_name_is_called_like_its_subpackage(declare: Declare, folder: Path) -> None:
    (job,) = declare('job = SinkJob(events=["order"])')
    assert job.name == "orders"
    assert job.projections == folder / "projections"
    assert isinstance(discovery.resolve(settings.load(environment=False), job).target, PostgresTarget)
    assert job.strategy == "dedup"


def test_a_target_that_is_a_function_is_written_as_a_transform_is(declare: Declare) -> None:
    known = settings.load(environment=False)
    (job,) = declare('job = SinkJob(events=["order"], target="tests.targets:write")')
    assert discovery.resolve(known, job).target == FunctionTarget("tests.targets:write")
    with raises("sink-unusable", "tests.targets.write"):
        discovery.resolve(known, replace(job, target="tests.targets.write"))
    for changed in ({"target": targets.write}, {"transform": targets.write}, {"target": FunctionTarget}):
        with raises("sink-unusable", "package.module:function"):
            discovery.resolve(known, replace(job, **changed))


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"strategy": "merge"}, "merge"),
        ({"target": "tests.missing:write"}, "tests.missing"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_before_the_start(
    declare: Declare, changed: dict[str, str], part: str
) -> None:
    known = settings.load(environment=False)
    (job,) = declare('job = SinkJob(events=["order"], target="tests.targets:write")')
    spec = discovery.resolve(known, job)
    spec.target.require_usable(spec)
    wrong = discovery.resolve(known, replace(job, **changed))  # type: ignore[arg-type]
    with raises("sink-unusable", part):
        wrong.target.require_usable(wrong)


def test_a_target_without_pyarrow_is_refused(declare: Declare, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = declare('job = SinkJob(events=["order"], target="tests.targets:write")')
    spec = discovery.resolve(settings.load(environment=False), job)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises("package-missing", "pyarrow"):
        spec.target.require_usable(spec)


def test_a_target_beside_projections_is_refused(declare: Declare, folder: Path) -> None:
    (job,) = declare('job = SinkJob(events=["order"], target="tests.targets:write")')
    (folder / "projections").mkdir()
    (folder / "projections" / "orders.sql").write_text("SELECT 1")
    spec = discovery.resolve(settings.load(environment=False), job)
    with raises("sink-unusable", "orders.sql"):
        spec.target.require_usable(spec)


def test_what_a_job_names_stays(declare: Declare, tmp_path: Path) -> None:
    (job,) = declare(f'job = SinkJob(name="mine", events=["order"], projections=Path({str(tmp_path)!r}))')
    assert (job.name, job.projections) == ("mine", tmp_path)


def test_paths_begin_at_the_subpackage(declare: Declare, folder: Path) -> None:
    (job,) = declare(
        'job = SinkJob(events=["order"], strategy=Path("mine.sql"), projections=Path("../others/projections"), '
        'target=LakehouseTarget(schema=Path("table.sql"), totals=Path("totals.sql")))'
    )
    assert job.strategy == folder / "mine.sql"
    assert job.projections == folder.parent / "others" / "projections"
    assert isinstance(job.target, LakehouseTarget)
    assert vars(job.target) == vars(LakehouseTarget(schema=folder / "table.sql", totals=folder / "totals.sql"))


@pytest.mark.parametrize(
    ("value", "names"), [("[first, first.by('merge')]", ["first", "first-merge"]), ("[]", []), ("(first,)", ["first"])]
)
def test_several_jobs_or_none_are_a_list_or_what_a_function_returns(
    declare: Declare, value: str, names: list[str]
) -> None:
    first = 'first = SinkJob(name="first", events=["order"])\n'
    for lines in (f"jobs = {value}", f"def jobs(settings): return {value}"):
        assert [job.name for job in declare(first + lines)] == names


@pytest.mark.parametrize(
    "lines",
    [
        "",
        'jab = SinkJob(events=["order"])',
        'job = ["order"]',
        'job = [SinkJob(events=["order"])]',
        'jobs = SinkJob(events=["order"])',
        'jobs = ["order"]',
        "def jobs(settings): pass",
        'job = SinkJob(events=["order"])\njobs = [job]',
        'def job(settings): return [SinkJob(events=["order"])]',
    ],
)
def test_a_module_without_a_usable_declaration_is_refused(declare: Declare, lines: str) -> None:
    with raises("sink-unusable", f"{PACKAGE}.orders.job"):
        declare(lines)


def test_two_jobs_of_a_subpackage_need_names(declare: Declare) -> None:
    jobs = declare('jobs = [SinkJob(events=["order"]), SinkJob(events=["item"])]')
    assert [job.name for job in jobs] == ["orders", "orders"]
    with raises("sink-unusable", "orders"):
        discovery.sinks(settings.load(environment=False))


def test_a_job_without_a_name_has_none_beside_it(declare: Declare) -> None:
    with raises("sink-unusable", "needs its name"):
        declare('first = SinkJob(events=["order"])\njobs = [first, first.by("merge")]')


def test_events_that_are_one_text_are_refused(declare: Declare) -> None:
    declare('job = SinkJob(events="order")')
    with raises("sink-unusable", "events=['order']"):
        discovery.sinks(settings.load(environment=False))
