"""The files that say what `outbox check` compares: what they mean, and what is refused with a reason."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from outbox.audit.declared import Addend, Declared
from outbox.sink import comparison_files
from outbox.sink.comparison_files import Comparison
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.failures import raises
from tests.support.audit_chain import SINK, declare

QUERIES = "\n-- [source]\nSELECT key, total FROM orders;\n\n-- [sink]\nSELECT sink, key, total FROM totals\n"
HUGE = Decimal("12345678901234567890123456789012345678.5")


@pytest.fixture
def declared(tmp_path: Path) -> Declared:
    return declare(tmp_path, names=("stock", "order"), comparisons=())


@pytest.fixture
def spec(declared: Declared, tmp_path: Path) -> SinkSpec:
    spec = declared.sinks[SINK]
    return replace(spec, job=replace(spec.job, projections=tmp_path / "projections"))


def written(spec: SinkSpec, text: str) -> Comparison:
    """The comparison of a file with this text."""
    folder = comparison_files.folder_of(spec)
    folder.mkdir()
    (folder / "totals.sql").write_text(text)
    (comparison,) = comparison_files.load(spec)
    return comparison


def added(declared: Declared, comparison: Comparison) -> dict[str, Addend | None]:
    """Addends of the sink's events."""
    declared = replace(declared, comparisons={SINK: [comparison]})
    topics = [replace(topic, properties=["change"]) for topic in declared.topics]
    addends = replace(declared, topics=topics).addends(declared.sinks[SINK], comparison)
    return {kind.schema.name: addend for kind, addend in zip(declared.kinds, addends, strict=True)}


def test_no_folder_is_no_comparison(spec: SinkSpec) -> None:
    assert comparison_files.load(spec) == []


def test_queries_are_read_without_their_last_semicolon(spec: SinkSpec) -> None:
    found = written(spec, QUERIES)
    assert (found.name, found.adds) == ("totals", ())
    assert (found.source, found.sink) == ("SELECT key, total FROM orders", "SELECT sink, key, total FROM totals")


def test_a_line_without_names_is_about_all_events(declared: Declared, spec: SinkSpec) -> None:
    found = added(declared, written(spec, f"-- adds: 1\n{QUERIES}"))
    assert set(found.values()) == {Addend(1)}


def test_lines_are_about_the_events_that_they_name(declared: Declared, spec: SinkSpec) -> None:
    found = added(declared, written(spec, f"-- adds: -change of stock.changed\n-- adds: 1 of order\n{QUERIES}"))
    assert found == {
        "stock.changed.v1": Addend(-1, 0),
        "stock.named.v1": None,
        "order.placed.v1": Addend(1),
        "order.placed.v2": Addend(1),
    }


def test_a_line_may_name_one_version(declared: Declared, spec: SinkSpec) -> None:
    found = added(declared, written(spec, f"-- adds: 1 of order.placed.v2, stock.named\n{QUERIES}"))
    assert [name for name, addend in found.items() if addend is not None] == ["order.placed.v2", "stock.named.v1"]


@pytest.mark.parametrize(
    ("adds", "problem"),
    [
        ("-- adds quantity", "`-- adds quantity` cannot be read"),
        ("-- adds: change, name", "cannot be read"),
        ("-- adds: 1 of", "cannot be read"),
        ("-- adds: change", "adds: change is no property of stock.named, and not a number"),
        ("-- adds: name of stock.named", "adds: name is text of stock.named"),
        ("-- adds: 1 of stock.unheard", "sink dedup has no event stock.unheard"),
        ("-- adds: 1 of stock\n-- adds: 1 of stock.changed", "two lines `adds` are about stock.changed"),
    ],
)
def test_a_line_that_nobody_can_follow_is_refused(spec: SinkSpec, adds: str, problem: str) -> None:
    with raises("comparison-unusable", "totals.sql", problem):
        written(spec, f"{adds}\n{QUERIES}")


def test_states_add_nothing(spec: SinkSpec) -> None:
    with raises("comparison-unusable", "states add nothing"):
        written(replace(spec, job=replace(spec.job, carries="states")), f"-- adds: 1\n{QUERIES}")


def test_a_section_that_nobody_knows_is_refused(spec: SinkSpec) -> None:
    with raises("sql-section-unknown", "totals.sql"):
        written(spec, f"{QUERIES}\n-- [other]\nSELECT 1")


@pytest.mark.parametrize(
    ("addend", "expected"),
    [(Addend(1), 1), (Addend(-1), -1), (Addend(1, 0), HUGE), (Addend(-1, 0), HUGE.copy_negate()), (Addend(1, 1), None)],
)
def test_what_an_event_adds_is_exact(addend: Addend, expected: object) -> None:
    assert addend.of([HUGE, None]) == expected


def test_an_unknown_addend_stays_unknown() -> None:
    assert Addend(1, 0, is_known=False).of([HUGE]) is None
