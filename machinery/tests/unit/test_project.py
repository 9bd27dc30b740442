"""The table [tool.outbox]: what a project declares, and how a wrong table is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox.base import project
from outbox.base.project import Project
from outbox_lab.testing.failures import raises


def load(root: Path, *lines: str) -> Project:
    """The project of a folder with such a table."""
    (root / project.FILE).write_text("\n".join(["[tool.outbox]", *lines]))
    return project.load(root)


def test_an_empty_table_is_a_project_with_every_default(tmp_path: Path) -> None:
    assert load(tmp_path) == Project(root=tmp_path)


def test_names_sinks_and_folders_are_read(tmp_path: Path) -> None:
    found = load(tmp_path, 'sink-database = "mine"', 'sinks = ["upsert", "dedup"]', 'connect = "else/where"')
    assert found.sink_database == "mine"
    assert found.sinks == ("upsert", "dedup")
    assert found.connect == tmp_path / "else" / "where"


@pytest.mark.parametrize("value", ['"dedup"', "true", "[1]"])
def test_sinks_that_are_no_list_of_names_are_refused(tmp_path: Path, value: str) -> None:
    with raises("project-wrong", "has sinks = ", "a list of names"):
        load(tmp_path, f"sinks = {value}")


def test_a_switch_is_true_or_false(tmp_path: Path) -> None:
    assert not load(tmp_path, "validate-events = false").validate_events
    project.load.cache_clear()
    with raises("project-wrong", "has validate-events = 'no'", "true or false"):
        load(tmp_path, 'validate-events = "no"')


def test_an_unknown_key_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with raises("project-wrong", "does not know tpoic", "topic"):
        load(tmp_path, 'tpoic = "events"')


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable names a project: only the working directory tells which it is."""
    monkeypatch.delenv(project.VARIABLE)


def declare(folder: Path, *lines: str) -> Path:
    """A folder with a pyproject.toml of these lines; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / project.FILE).write_text("\n".join(lines))
    return folder


@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("below", [".", "sinks", "connect/events"])
def test_the_project_is_found_in_its_folder_and_below(
    below: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = declare(tmp_path / "project", "[tool.outbox]")
    (root / below).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(root / below)
    assert project.current() == Project(root=root)


@pytest.mark.usefixtures("unnamed")
def test_a_folder_without_the_table_belongs_to_the_project_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = declare(tmp_path / "project", "[tool.outbox]")
    monkeypatch.chdir(declare(root / "tools", "[tool.other]"))
    assert project.current().root == root


@pytest.mark.usefixtures("unnamed")
def test_of_two_projects_the_inner_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = declare(declare(tmp_path / "outer", "[tool.outbox]") / "inner", "[tool.outbox]")
    monkeypatch.chdir(inner)
    assert project.current().root == inner


@pytest.mark.usefixtures("unnamed")
@pytest.mark.parametrize("lines", [[], ["[tool.other]"]])
def test_outside_of_every_project_the_failure_says_what_to_do(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(declare(tmp_path / "elsewhere", *lines))
    with raises("project-missing", "[tool.outbox]", "in the project's folder", project.VARIABLE):
        project.current()


def test_the_variable_wins_over_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = declare(tmp_path / "named", "[tool.outbox]")
    monkeypatch.chdir(declare(tmp_path / "here", "[tool.outbox]"))
    monkeypatch.setenv(project.VARIABLE, str(named))
    assert project.current().root == named


def test_a_variable_that_names_no_project_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(declare(tmp_path / "here", "[tool.outbox]"))
    monkeypatch.setenv(project.VARIABLE, str(tmp_path / "elsewhere"))
    with raises("project-missing", "elsewhere", f"correct {project.VARIABLE}"):
        project.current()
