"""Strategies and projections as files: a typing mistake in a header or a section is reported, not ignored. And what the
SQL of the machinery and the settings of its tests must say.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outbox
from outbox.sink.applying import projection
from outbox.sink.applying.projection import Projection
from outbox.sink.remembering import strategy
from outbox.sink.remembering.strategy import Strategy
from outbox_lab.stack import config
from outbox_lab.testing.failures import raises
from tests.support import suite

HEADER = "-- an idea\n-- memory: none\n"
IDS = "INSERT INTO ids SELECT FROM batch, dedup_horizon"
SOURCES = Path(outbox.__file__).parent
MADE = re.compile(r"\bCREATE (?:TABLE|VIEW|FUNCTION) (?:public\.)?(\w+)")


def projection_of(folder: Path, text: str) -> Projection:
    (folder / "mine.sql").write_text(text)
    (found,) = projection.load(folder, "events")
    return found


def strategy_of(folder: Path, text: str) -> Strategy:
    (folder / "mine.sql").write_text(text)
    return strategy.load(folder)["mine"]


@pytest.mark.parametrize("begin", ["", "\n \n", "-- of /* some\n", "/* a\n\n comment */\n-- and another\n"])
@pytest.mark.parametrize("blanks", ["", "\t ", "\r"])
def test_comments_before_a_section_and_blanks_behind_its_line_do_not_matter(
    tmp_path: Path, begin: str, blanks: str
) -> None:
    text = f"{begin}-- [refuse]{blanks}\n-- nothing [yet]\nSELECT 1;\n-- [apply]{blanks}\nSELECT 2;\n"
    found = projection_of(tmp_path, text)
    assert found.refuse is not None
    assert (found.refuse.splitlines()[-1], found.apply.strip()) == ("SELECT 1;", "SELECT 2;")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(
            (text, "sql-section-unknown")
            for line in ("--[refuse]", " -- [refuse]", "-- [refuse", "-- [refuse] x", "-- [re fuse]", "-- []")
            for text in (f"{line}\nSELECT 1;\n-- [apply]\nSELECT 2;", f"{line}\nSELECT 1;")
        ),
        *(
            (f"{begin}-- [apply]\nSELECT 2;", "sql-section-unknown")
            for begin in ("SELECT 1;\n", "/* what\n-- it does */ SELECT 1;\n", "-- a comment\n\nSELECT 1\n;\n")
        ),
        *(
            (f"{line}\nSELECT 1;", "projection-unusable")
            for line in ("-- ordered: yes", "-- ordered:", "-- ordered = true")
        ),
    ],
)
def test_a_projection_that_says_what_nobody_understands_is_reported(tmp_path: Path, text: str, code: str) -> None:
    with raises(code, "mine.sql"):
        projection_of(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "is_ordered"),
    [("-- ordered", True), ("--ordered\t", True), ("--  Ordered", True), ("-- ordered by version", False)],
)
def test_an_ordered_projection_is_recognised(tmp_path: Path, line: str, is_ordered: bool) -> None:
    assert projection_of(tmp_path, f"-- the events are\n{line}\nSELECT 1;").is_ordered is is_ordered


@pytest.mark.parametrize("form", ["-- {}: {} \t", "--{}:{}", "--  {} : {}"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("start", "earliest"), ("start", "positions"), ("knows", "positions"), ("knows", "events")),
        *(("takes", "states"), ("takes", "events")),
    ],
)
def test_an_option_has_its_value(tmp_path: Path, form: str, option: str, value: str) -> None:
    found = strategy_of(tmp_path, f"{HEADER}{form.format(option, value)}\nSELECT 1;")
    assert getattr(found, option) == value


@pytest.mark.parametrize(
    ("memory", "by"),
    [
        ("none", None),
        ("ids by event_id", ("event_id",)),
        ("ids by key version", ("key", "version")),
        ("ids by key versions", ("key", "versions")),
        ("ids by topic_id partition offset", ("topic_id", "partition", "offset")),
        ("ids by table_name pk lsn op", ("table_name", "pk", "lsn", "op")),
    ],
)
def test_the_header_says_what_a_strategy_remembers(tmp_path: Path, memory: str, by: tuple[str, ...] | None) -> None:
    found = strategy_of(tmp_path, HEADER.replace("memory: none", f"memory: {memory}") + IDS).memory
    assert found == (None if by is None else strategy.Memory("ids", by))
    if found is not None:
        kinds = [found.is_of_ids, found.is_of_keys, found.is_of_places, found.is_of_changes]
        assert kinds.count(True) == 1


@pytest.mark.parametrize(
    ("line", "statements"),
    [
        *((f"-- memory: none\n-- {option}", "SELECT 1;") for option in ("takes: state", "knows: position", "takes:")),
        *((f"-- memory: none\n-- {option}", "SELECT 1;") for option in ("start: latest", "takes: States")),
        *((f"-- memory: {memory}", IDS) for memory in ("ids", "ids by time", "", "idz by event_id")),
        ("-- memory: ids by key version", "SELECT 1 -- ids"),
        ("-- memory: ids by event_id", "INSERT INTO ids SELECT FROM batch"),  # it would apply again
    ],
)
def test_a_header_that_cannot_be_is_reported(tmp_path: Path, line: str, statements: str) -> None:
    with raises("strategy-unusable", "mine.sql"):
        strategy_of(tmp_path, f"-- an idea\n{line}\n{statements}")


def test_each_statement_names_the_schema_of_our_tables() -> None:
    """A service may have a table ``outbox`` of its own, in a schema that comes first in its search path.

    A migration runs with the search path of its session.
    """
    migrations = sorted((SOURCES / "migrations").glob("*/*.py"))
    ours = {name for file in migrations for name in MADE.findall(file.read_text())}
    assert {"outbox", "idempotency_keys", "sinks", "dead_letters", "processed_events", "first_uuid_of"} <= ours
    names = "|".join(sorted(ours))
    unqualified = re.compile(
        rf"\b(?:FROM|JOIN|INTO|UPDATE|USING|TRUNCATE|TABLE|LIKE)\s+(?:{names})\b(?!\()|\bSELECT (?:{names})\("
        r"|\bON\s+(?:outbox|idempotency_keys)\b|'outbox', privilege"
    )
    wrong = {
        f"{file.relative_to(SOURCES)}: {found[0]}"
        for file in sorted(SOURCES.rglob("*"))
        if file.suffix in (".py", ".sql") and "migrations" not in file.parts
        for found in unqualified.finditer(file.read_text())
    }
    assert wrong == set()


def test_the_worker_of_tests_differs_in_its_session_timeout_only() -> None:
    def properties(text: str) -> dict[str, str]:
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    ours = properties((config.OURS / config.WORKER).read_text())
    used = properties(config.file(config.WORKER).read_text())
    assert config.file(config.WORKER).is_relative_to(suite.DOMAIN)
    assert {name for name in ours | used if ours.get(name) != used.get(name)} == {"session.timeout.ms"}
