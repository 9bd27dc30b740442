"""The contract test: what it compares, deliveries that a strategy does not promise, histories made from schemas; and
targets that are functions: upserts pass, and other functions are named.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from hypothesis import given, settings

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, load
from outbox.events import catalog
from outbox.sink import discovery
from outbox.sink.remembering.strategy import BUILT_IN, find
from outbox.sink.spec import SinkJob
from outbox.targets import newest
from outbox_lab.testing.contract.contract import WAYS, keep, survived_by, untestable
from outbox_lab.testing.contract.delivery import Reader
from outbox_lab.testing.contract.events import History, Lifecycle, histories, values
from tests import items, targets
from tests.support.made_events import SPECS
from tests.targets import erase, totals


def test_the_tables_of_the_project_are_compared_and_no_others(databases: Settings) -> None:
    with closing(connect(databases, SinkRole.OWNER)) as owner:
        tables = {table.name: table for table in Reader(owner, find("dedup")).tables}
        assert {*tables} == {"activity", "handled_events", "orders", "stock"}
    assert "updated_at" not in tables["stock"].columns
    assert tables["activity"].key == ["aggregate", "key"]


def test_ways_that_a_strategy_does_not_promise_are_left_out() -> None:
    """A new strategy is one number here: of the ways that it does not survive."""
    all_ways = [way for way in WAYS if not way.is_of_function]
    left_out = {name: len(all_ways) - len(survived_by(spec)) for name, spec in SPECS.items()}
    assert left_out == {"dedup": 0, "merge": 0, "versions": 0, "upsert": 1, "offsets": 2, "naive": 4}
    assert {file.stem for file in BUILT_IN.glob("*.sql")} <= {*left_out}


# Histories that are made from schemas ---------------------------------------------------------------------------------


SETTINGS = load(environment=False)
ORDERS = discovery.chosen(SETTINGS, "activity")
RULES: list[dict[str, Any]] = [
    {"type": "integer", "minimum": 3, "exclusiveMaximum": 5},
    {"type": "integer", "multipleOf": 7, "not": {"const": 0}},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "string", "pattern": "^[A-Z]{3}$", "maxLength": 3},
    {"type": "string", "format": "date-time", "pattern": "Z$"},
    {"type": ["string", "null"], "format": "uuid"},
    {"enum": ["a", None, 3]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "format": "date"}]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 9}], "minimum": 1},
    {"type": "array", "items": {"type": "integer"}, "minItems": 5, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "integer"}, "minItems": 2},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"const": 1}}, "if": {"required": ["a"]}, "then": {"maxProperties": 1}},
    {},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_value_is_valid(rule: dict[str, Any]) -> None:
    validator = jsonschema_rs.Draft202012Validator(rule, validate_formats=True)

    @settings(max_examples=20, database=None)
    @given(values(rule))
    def check(value: Any) -> None:
        assert validator.is_valid(value)

    check()


def test_examples_serve_where_no_value_can_be_made() -> None:
    rule = {"type": "string", "pattern": "(?!)|^x$", "maxLength": 0, "minLength": 0}
    with pytest.raises(Failure) as failure:
        values(rule)
    assert failure.value.code == "contract-no-values"
    strange = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "minProperties": 1}
    found = values(strange, [{"x1": 1}, {"x1": "no"}])

    @settings(max_examples=5, database=None)
    @given(found)
    def check(value: Any) -> None:
        assert value == {"x1": 1}

    check()


def test_histories_have_every_event_and_version() -> None:
    seen = set[str]()

    @settings(max_examples=60, database=None, derandomize=True)
    @given(histories(SETTINGS, ORDERS, Lifecycle()))
    def look(history: History) -> None:
        seen.update(one.schema.name for one in history.sent)

    look()
    known = catalog.of_project(SETTINGS)
    topics = {schema.name: known.aggregates[schema.aggregate].topic for schema in known.schemas}
    assert seen == {name for name, topic in topics.items() if topic in ORDERS.topics} >= {"order.placed.v2"}


# Targets that are functions -------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["add", "erase", "replace_any", "totals"]  # of a target's module

FreshDatabases = Callable[[], AbstractContextManager[Settings]]
SEED = 47


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))


def add(events: pa.Table) -> None:
    """Adds what an event adds, each time that it is called."""
    with targets.database() as connection:
        connection.executemany(
            """
            INSERT INTO stock VALUES (:item_id, :version % 10, :version)
            ON CONFLICT (item_id) DO UPDATE SET total = stock.total + excluded.total,
                                                version = max(stock.version, excluded.version)
            """,
            events.to_pylist(),
        )


def replace_any(events: pa.Table) -> None:
    """Takes the newest of a batch, although the place may have a newer one."""
    rows = newest(events, key="item_id", version="version").to_pylist()
    with targets.database() as connection:
        connection.executemany("INSERT OR REPLACE INTO stock VALUES (:item_id, :version, :version)", rows)


def require(fresh: FreshDatabases, target: str, strategy: str = "dedup") -> None:
    job = SinkJob("search", Path("none"), target, [items.AGGREGATE], strategy)
    with fresh() as settings:
        spec = discovery.resolve(settings, job)
        assert untestable(spec) is None
        keep(settings, spec, seed=SEED, examples=3, shrinking_max=0)


@pytest.mark.parametrize(("function", "strategy"), [("write", "dedup"), ("write_newest", "upsert")])
def test_an_upsert_keeps_the_contract(fresh_databases: FreshDatabases, function: str, strategy: str) -> None:
    require(fresh_databases, f"{targets.__name__}:{function}", strategy)
    assert targets.totals() == [], "the test has left nothing"


@pytest.mark.parametrize(
    ("function", "strategy", "way"),
    [
        ("add", "dedup", "the process ends between target and commit"),
        ("replace_any", "upsert", "written late by a driver that was cut off"),
    ],
)
def test_what_is_no_upsert_is_named(fresh_databases: FreshDatabases, function: str, strategy: str, way: str) -> None:
    with pytest.raises(AssertionError) as caught:
        require(fresh_databases, f"{__name__}:{function}", strategy)
    expected = f"sink search, {way}: table totals of {__name__}:{function}, row key "
    assert str(caught.value).startswith(expected), caught.value
    assert targets.totals() == []


def test_a_place_that_is_not_empty_is_left_alone(fresh_databases: FreshDatabases) -> None:
    with targets.database() as connection:
        connection.execute("INSERT INTO stock VALUES ('mine', 1, 1)")
    with pytest.raises(AssertionError, match="is not empty, it has the key mine"):
        require(fresh_databases, f"{targets.__name__}:write")
    assert targets.totals() == [("mine", 1, 1)]


def test_a_module_without_totals_is_left_out(monkeypatch: pytest.MonkeyPatch, fresh_databases: FreshDatabases) -> None:
    monkeypatch.delattr(targets, "totals")
    with fresh_databases() as settings:
        job = SinkJob("search", Path("none"), f"{targets.__name__}:write", [items.AGGREGATE])
        assert str(untestable(discovery.resolve(settings, job))).endswith("has no function totals")
