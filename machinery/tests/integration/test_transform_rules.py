"""The helper for a project's own tests: good transforms pass, and each wrong one is named."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql.types import DecimalType, StringType, StructField, StructType

from outbox.base.settings import load
from outbox.events.schema import Column
from outbox.sink.decoding.layout import Layout
from outbox.sink.discovery import event_decoders
from outbox.sink.spark.transform import Function, Transform, as_events, frame_schema, not_storable, quoted
from outbox_lab.testing import check_transform, example_events
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.spark import leaves_sockets
from outbox_lab.testing.transform_rules import ONE_ROW, PLACES_KEPT, SAME_ROW, SEED
from tests import transforms
from tests.support import declared
from tests.support.declared import Events
from tests.support.declared_sinks import record, sink
from tests.support.made_events import as_read, nth_key

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets

SETTINGS = load(environment=False)
UNITS = ["KGM", "GRM", "LTR"]
# By the transform: the rule, and the column by which it is broken, if it is one.
WRONG: dict[Function, tuple[str, str]] = {
    transforms.numbered: (SAME_ROW, "column number: "),
    transforms.aggregated: (SAME_ROW, "no row among all, a row "),
    transforms.timed: (SAME_ROW, "column at: "),
    transforms.random: (SAME_ROW, "column number: 0."),
    transforms.limited: (SAME_ROW, "no row among all, a row "),
    transforms.doubled: (ONE_ROW, "it has two equal rows"),
    transforms.exploded: (ONE_ROW, "column part: 'one' and 'two'"),
    transforms.invented: (PLACES_KEPT, "no event is there"),
    transforms.moved: (PLACES_KEPT, "no event is there"),
}


@pytest.fixture(scope="module")
def items(spark: SparkSession) -> DataFrame:
    """Events of items of three units, none of them of a quantity that makes a transform fail."""
    payloads = [payload(number) for number in range(60)]
    return example_events(spark, SETTINGS, ["item"], {"item.received": payloads[:30], "item.picked": payloads[30:]})


def payload(number: int) -> dict[str, Any]:
    return {
        "movement_id": nth_key(1000 + number),
        "item_id": nth_key(number % 4),
        "quantity": (100 + number) * (1 if number < 30 else -1),
        "unit": UNITS[number % 3],
        "stock_after": 5,
        "version": 1 + number,
        "occurred_at": "2026-11-21T10:00:00.123456Z",
    }


@pytest.mark.parametrize("good", ["weighed", "shuffled", "read_twice", "in_python", "failing", "unreadable"])
def test_a_transform_that_keeps_the_rules_passes(items: DataFrame, good: str) -> None:
    rows = check_transform(getattr(transforms, good), items)
    assert len(rows) == (40 if good in ("weighed", "shuffled") else 60)
    assert [row["event_id"] for row in rows] == sorted(row["event_id"] for row in rows)


def test_the_rows_are_returned_as_the_sink_would_have_them(items: DataFrame) -> None:
    first = check_transform(transforms.weighed, items)[0]
    assert (first["quantity"], first["weight"], first["share"]) == (100, Decimal(100_000), 25.0)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_one_that_breaks_a_rule_is_named_with_event_and_column(items: DataFrame, wrong: Function) -> None:
    rule, column = WRONG[wrong]
    with pytest.raises(AssertionError) as caught:
        check_transform(wrong, items)
    message = str(caught.value)
    assert message.startswith(f"{wrong.__name__} breaks the rule: {rule}. Event ")
    assert column in message
    assert f"seed {SEED})" in message


@pytest.mark.parametrize("wrong", ["without_id", "with_an_array", "ambiguous"])
def test_one_that_no_sink_can_take_is_named(items: DataFrame, wrong: str) -> None:
    with pytest.raises(AssertionError, match=f"no sink can take {wrong}: "):
        check_transform(getattr(transforms, wrong), items)


def test_a_test_without_events_shows_nothing(items: DataFrame) -> None:
    with pytest.raises(AssertionError, match="no events"):
        check_transform(transforms.weighed, items.limit(0))


def test_an_error_of_the_transform_is_raised_as_it_is(items: DataFrame) -> None:
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO"):
        check_transform(transforms.always_failing, items)


# The events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["item"], ["order"], ["item", "order"], ["order.placed.v1"]])
def test_examples_have_the_columns_that_a_sink_gives(spark: SparkSession, names: list[str]) -> None:
    found = example_events(spark, SETTINGS, names, count=20)
    assert found.schema == frame_schema(Layout.of_decoders(event_decoders(SETTINGS, names)))
    rows = found.collect()
    assert rows == example_events(spark, SETTINGS, names, count=20).collect(), "they are the same each time"
    assert len({(row.event_id, row.partition, row.offset) for row in rows}) == len(rows) == 20


def test_examples_of_older_versions_are_upcast(spark: SparkSession) -> None:
    rows = example_events(spark, SETTINGS, ["order.placed"], count=20).collect()
    assert {row.unit for row in rows} >= {"PCE"}


def test_payloads_that_a_sink_would_not_take_are_refused(spark: SparkSession) -> None:
    with raises("event-invalid", "quantity"):
        example_events(spark, SETTINGS, ["item"], {"item.received": [payload(1) | {"quantity": "many"}]})
    with raises("event-invalid", "item.picked"):
        example_events(spark, SETTINGS, ["item.received"], {"item.picked": [payload(31)]})
    with raises("event-invalid", "aggregate type"):
        example_events(spark, SETTINGS, ["item"], {"item": [payload(1)]})
    with raises("event-undeclared", "item.nothing"):
        example_events(spark, SETTINGS, ["item"], {"item.nothing": [payload(1)]})


@pytest.mark.parametrize("name", ["plain", "a`b", "`", "a.b", "``a` b"])
def test_a_column_may_have_any_name(spark: SparkSession, name: str) -> None:
    rows = spark.createDataFrame([(1, 2)], ["other", name])
    assert rows.select([quoted(name)]).toArrow().to_pylist() == [{name: 2}]


def test_a_property_may_have_the_name_of_the_topic(spark: SparkSession, tmp_path: Path) -> None:
    values = {"topic": "mine", "o'clock `s`": "noon"}
    schema = declared.payload({name: {"type": "string"} for name in values})
    spec = sink(Events(tmp_path).aggregate("order", placed_v1=schema).load(), "order", projections=tmp_path)
    spec = replace(spec, job=replace(spec.job, transform="tests.transforms:everything"))
    [(topic, decoder)] = spec.decoders.items()
    decoded = decoder.decode(as_read(record("placed", {"id": "a", "number": 1, **values})))
    events = as_events(spec.layout.table(decoded.rows), topic)
    returned = Transform(spark, spec).apply(events).rows
    assert returned is not None
    assert returned.select([*values]).to_pylist() == [values]
    assert events["outbox_topic"].to_pylist() == [topic]
    assert "outbox_topic" not in returned.column_names


@pytest.mark.parametrize("name", ["ctid", "outbox_version", "a%", "a:b", 'a"b', "a" * 52])
def test_a_name_that_no_column_of_postgres_can_have_is_refused(name: str) -> None:
    given = frame_schema(Layout({"order.placed": [Column("price:numeric", "numeric", is_nullable=True)]}))
    assert not_storable(StructType([*given, StructField(name, StringType())]), given) is not None
    cast = [StructField("price:numeric", DecimalType(38, 2)) if one.name == "price:numeric" else one for one in given]
    assert not_storable(StructType(cast), given) is None
