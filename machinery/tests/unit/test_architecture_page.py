"""The page about the architecture: the places that its table of transitions names exist, and are the only ones."""

from __future__ import annotations

import ast
import re

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
SINK = ROOT / "src" / "outbox" / "sink"
UPDATE = re.compile(r"UPDATE (?:public\.)?dead_letters\b")
PLACE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def test_each_place_of_a_transition_exists() -> None:
    places = set(PLACE.findall(PAGE.read_text()))
    assert len(places) > 10
    assert [f"{file}::{name}" for file, name in sorted(places) if not _has(file, name)] == []


def test_each_transition_of_a_dead_letter_has_one_statement() -> None:
    sql = {
        file.relative_to(SINK).as_posix(): file.read_text()
        for file in SINK.rglob("*")
        if file.suffix in (".py", ".sql")
    }
    assert [name for name, text in sql.items() if UPDATE.search(text)] == ["remembering/dead_letters.py"]
    assert re.findall(r"SET status = '(\w+)'", sql["remembering/dead_letters.py"]) == ["replayed", "discarded"]


def _has(file: str, name: str) -> bool:
    body = ast.parse((SINK / file).read_text()).body if (SINK / file).is_file() else []
    for part in name.split("."):
        found = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == part]
        if not found:
            return False
        body = found[0].body
    return True
