"""The runbook keeps its form: each entry has its parts, real commands and codes, and a rehearsal that exists."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import click
import pytest

from outbox.cli import outbox
from tests.support import runbook
from tests.support.paths import ROOT
from tests.support.runbook import PARTS, Entry

SOURCES = ROOT / "src"
ENTRIES = pytest.mark.parametrize("entry", runbook.entries().values(), ids=lambda entry: entry.title)


@cache
def ids(file: Path) -> frozenset[str]:
    """The ids of a file of tests, of its tests, and of its classes and their tests."""
    name = file.relative_to(ROOT).as_posix()
    found = {name}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name.lower().startswith("test"):
            found.add(f"{name}::{node.name}")
            methods = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{name}::{node.name}::{one.name}" for one in methods if isinstance(one, ast.FunctionDef)}
    return frozenset(found)


@cache
def strings() -> frozenset[str]:
    """Every string in the sources of the machinery."""
    return frozenset(
        node.value
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def parses(command: click.Command, words: list[str]) -> bool:
    """Whether a command has this subcommand, these arguments and these options."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        found = command.get_command(context, words[0]) if words else None
        return found is not None and parses(found, words[1:])
    try:
        command.parse_args(context, words)
    except click.UsageError:
        return False
    return True


@ENTRIES
def test_entry_has_its_parts_real_commands_and_codes_and_a_rehearsal_that_exists(entry: Entry) -> None:
    assert tuple(entry.parts) == PARTS
    assert all(text.strip() for text in entry.parts.values())
    assert entry.rehearsals
    for name in entry.rehearsals:
        assert name in ids(ROOT / name.partition("::")[0])
    for words in entry.mentioned:
        assert parses(outbox, list(words)), words
    assert set(entry.codes) <= strings()


def test_each_rehearsal_of_a_recovery_belongs_to_an_entry() -> None:
    files = (ROOT / "tests" / "recovery").glob("test_*.py")
    rehearsals = {name for file in files for name in ids(file) if "::" in name}
    assert rehearsals
    assert rehearsals <= {name for entry in runbook.entries().values() for name in entry.rehearsals}


def test_command_with_an_unknown_option_does_not_parse() -> None:
    assert parses(outbox, ["rewind", "NAME", "--to-earliest"])
    assert not parses(outbox, ["rewind", "NAME", "--to-earlier"])
    assert not parses(outbox, ["undo"])
