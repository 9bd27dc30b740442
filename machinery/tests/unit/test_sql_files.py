"""Strategies and projections as files: a typing mistake in a header or a section is reported, not ignored."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outbox
from outbox.sink.applying import projection
from outbox.sink.applying.projection import Projection
from outbox.sink.remembering import strategy
from outbox.sink.remembering.strategy import Strategy
from outbox_lab.testing.failures import raises

HEADER = "-- an idea\n-- memory: none\n"


def projection_of(folder: Path, text: str) -> Projection:
    (folder / "mine.sql").write_text(text)
    (found,) = projection.load(folder, "events")
    return found


def strategy_of(folder: Path, text: str) -> Strategy:
    (folder / "mine.sql").write_text(text)
    return strategy.load(folder)["mine"]


@pytest.mark.parametrize("blanks", ["", " ", "\t ", "\r"])
def test_blanks_at_the_end_of_a_section_line_do_not_matter(tmp_path: Path, blanks: str) -> None:
    found = projection_of(tmp_path, f"-- about\n\n-- [refuse]{blanks}\nSELECT 1;\n-- [apply]{blanks}\nSELECT 2;\n")
    assert (found.refuse, found.apply.strip()) == ("SELECT 1;", "SELECT 2;")


def test_a_section_of_comments_only_stays_a_section(tmp_path: Path) -> None:
    found = projection_of(tmp_path, "-- [refuse]\n-- nothing [yet]\n-- [apply]\nSELECT 2;")
    assert found.apply.strip() == "SELECT 2;"


@pytest.mark.parametrize("line", ["--[refuse]", " -- [refuse]", "-- [refuse", "-- [refuse] x", "-- [re fuse]", "-- []"])
def test_a_line_that_looks_like_a_section_is_reported(tmp_path: Path, line: str) -> None:
    for text in (f"{line}\nSELECT 1;\n-- [apply]\nSELECT 2;", f"{line}\nSELECT 1;"):
        with raises("sql-section-unknown", line.strip()):
            projection_of(tmp_path, text)


@pytest.mark.parametrize(
    "begin", ["SELECT 1;\n", "/* what\n-- it does */ SELECT 1;\n", "-- a comment\n\nSELECT 1\n;\n"]
)
def test_sql_before_the_first_section_is_reported(tmp_path: Path, begin: str) -> None:
    with raises("sql-section-unknown"):
        projection_of(tmp_path, f"{begin}-- [apply]\nSELECT 2;")


@pytest.mark.parametrize("begin", ["", "\n \n", "-- of /* some\n", "/* a\n\n comment */\n-- and another\n"])
def test_comments_before_the_first_section_are_ignored(tmp_path: Path, begin: str) -> None:
    assert projection_of(tmp_path, f"{begin}-- [apply]\nSELECT 2;").apply.strip() == "SELECT 2;"


@pytest.mark.parametrize("line", ["-- ordered", "-- ordered ", "--ordered\t", "--  Ordered"])
def test_an_ordered_projection_is_recognised(tmp_path: Path, line: str) -> None:
    assert projection_of(tmp_path, f"-- about\n{line}\nSELECT 1;").is_ordered


def test_a_sentence_about_order_is_no_option(tmp_path: Path) -> None:
    assert not projection_of(tmp_path, "-- the events are\n-- ordered by version\nSELECT 1;").is_ordered


@pytest.mark.parametrize("line", ["-- ordered: yes", "-- ordered:", "-- ordered = true"])
def test_a_value_of_ordered_is_reported(tmp_path: Path, line: str) -> None:
    with raises("projection-unusable"):
        projection_of(tmp_path, f"{line}\nSELECT 1;")


@pytest.mark.parametrize("form", ["-- {}: {}", "-- {}: {} \t", "--{}:{}", "--  {} : {}"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("start", "earliest"),
        ("start", "positions"),
        ("knows", "positions"),
        ("knows", "events"),
        ("takes", "states"),
        ("takes", "events"),
    ],
)
def test_an_option_has_its_value(tmp_path: Path, form: str, option: str, value: str) -> None:
    found = strategy_of(tmp_path, f"{HEADER}{form.format(option, value)}\nSELECT 1;")
    assert getattr(found, option) == value


@pytest.mark.parametrize(
    "line",
    [
        "-- takes: state",
        "-- knows: position",
        "-- start: latest",
        "-- takes:",
        "-- takes: States",
    ],
)
def test_an_unknown_value_of_an_option_is_reported(tmp_path: Path, line: str) -> None:
    with raises("strategy-unusable", line.strip("- :").split(":")[0]):
        strategy_of(tmp_path, f"{HEADER}{line}\nSELECT 1;")


IDS = "INSERT INTO ids SELECT FROM batch, dedup_horizon"


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


@pytest.mark.parametrize(
    "by", ["event_id", "key version", "key versions", "topic_id partition offset", "lsn", "key lsn", "lsn offset"]
)
def test_a_memory_is_of_one_kind(by: str) -> None:
    found = strategy.Memory("ids", tuple(by.split()))
    kinds = [found.is_of_ids, found.is_of_keys, found.is_of_places, found.is_of_changes]
    assert kinds.count(True) == 1


@pytest.mark.parametrize(
    ("memory", "statements"),
    [
        ("ids", IDS),
        ("ids by time", IDS),
        ("", IDS),
        ("idz by event_id", IDS),
        ("ids by key version", "SELECT 1 -- ids"),
        ("ids by event_id", "INSERT INTO ids SELECT FROM batch"),  # it would apply again
    ],
)
def test_a_memory_that_cannot_be_is_reported(tmp_path: Path, memory: str, statements: str) -> None:
    with raises("strategy-unusable", "mine.sql"):
        strategy_of(tmp_path, HEADER.replace("memory: none", f"memory: {memory}") + statements)


UNQUALIFIED = re.compile(r"\b(?:FROM|INTO|UPDATE|JOIN|TABLE|ON)\s+(?:outbox|idempotency_keys)\b|'outbox', privilege")


def test_statements_on_the_source_name_the_schema_of_our_tables() -> None:
    """A service may have a table ``outbox`` of its own, in a schema that comes first in its search path."""
    folder = Path(outbox.__file__).parent
    found = [
        f"{file.relative_to(folder)}: {match[0]}"
        for file in sorted(folder.rglob("*.py"))
        if "migrations" not in file.parts
        for match in UNQUALIFIED.finditer(file.read_text())
    ]
    assert found == []


MADE = re.compile(r"\bCREATE (?:TABLE|VIEW|FUNCTION) (?:public\.)?(\w+)")
SOURCES = Path(outbox.__file__).parent


def ours() -> set[str]:
    """Tables, views and functions of the machinery's migrations."""
    files = sorted((SOURCES / "migrations").glob("*/*.py"))
    found = {name for file in files for name in MADE.findall(file.read_text())}
    assert {"outbox", "idempotency_keys", "sinks", "dead_letters", "processed_events", "first_uuid_of"} <= found
    return found


def test_each_statement_names_the_schema_of_our_tables() -> None:
    """A migration runs with the search path of its session. Everything else may meet another table of that name."""
    names = "|".join(sorted(ours()))
    unqualified = re.compile(
        rf"\b(?:FROM|JOIN|INTO|UPDATE|USING|TRUNCATE|LIKE)\s+(?:{names})\b(?!\()|\bSELECT (?:{names})\("
    )
    files = [file for file in sorted(SOURCES.rglob("*")) if file.suffix in (".py", ".sql")]
    wrong = {
        f"{file.relative_to(SOURCES)}: {found[0]}"
        for file in files
        if "migrations" not in file.parts
        for found in unqualified.finditer(file.read_text())
    }
    assert wrong == set()
