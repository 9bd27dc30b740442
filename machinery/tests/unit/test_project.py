"""The table [tool.outbox]: what a project declares, and how a wrong table is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox.base import project
from outbox.base.project import Project
from outbox.testing.failures import raises


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


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ('topic = "events"', "topic is now topic-prefix"),
        ('strategies = ["dedup"]', "strategies is now sinks"),
        ('topic = "events"\nstrategies = ["dedup"]', "topic is now topic-prefix; a topic of another name"),
    ],
)
def test_a_key_of_before_is_refused_with_its_new_name(tmp_path: Path, line: str, hint: str) -> None:
    with raises("project-wrong", hint, "docs/updating.md"):
        load(tmp_path, line)


def test_an_unknown_key_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with raises("project-wrong", "does not know tpoic", "topic"):
        load(tmp_path, 'tpoic = "events"')
