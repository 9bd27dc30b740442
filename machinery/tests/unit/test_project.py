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
    with raises("project-wrong", "has sinks = ", "Expected `"):
        load(tmp_path, f"sinks = {value}")


def test_an_unknown_key_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with raises("project-wrong", "does not know tpoic", "topic"):
        load(tmp_path, 'tpoic = "events"')


def declare(folder: Path, *lines: str) -> Path:
    """A folder with a pyproject.toml of these lines; the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / project.FILE).write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ("outer", "outer"),
        ("outer/connect/events", "outer"),
        ("outer/tools", "outer"),  # whose own table is another tool's
        ("outer/inner", "outer/inner"),
    ],
)
def test_the_innermost_project_around_the_working_directory_is_found(
    here: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, table in {"outer": "outbox", "outer/tools": "other", "outer/inner": "outbox"}.items():
        declare(tmp_path / name, f"[tool.{table}]")
    (tmp_path / here).mkdir(parents=True, exist_ok=True)
    monkeypatch.delenv(project.VARIABLE)
    monkeypatch.chdir(tmp_path / here)
    assert project.current() == Project(root=tmp_path / found)


@pytest.mark.parametrize("lines", [[], ["[tool.other]"]])
def test_outside_of_every_project_the_failure_says_what_to_do(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(project.VARIABLE)
    monkeypatch.chdir(declare(tmp_path / "elsewhere", *lines))
    with raises("project-missing", "[tool.outbox]", "in the project's folder", project.VARIABLE):
        project.current()


def test_the_variable_wins_over_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = declare(tmp_path / "named", "[tool.outbox]")
    monkeypatch.chdir(declare(tmp_path / "here", "[tool.outbox]"))
    monkeypatch.setenv(project.VARIABLE, str(named))
    assert project.current().root == named
    monkeypatch.setenv(project.VARIABLE, str(tmp_path / "elsewhere"))
    with raises("project-missing", "elsewhere", f"correct {project.VARIABLE}"):
        project.current()
