"""Transforms of item events: good ones, and one for each way to break a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
from pyspark.sql import Window
from pyspark.sql import functions as f
from pyspark.sql.pandas.functions import arrow_udf, pandas_udf

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

FILE: list[str] = []  # that a test has made
GRAMS = {"KGM": 1000, "GRM": 1}
LEFT_OUT = 10**9  # the size of a quantity
FAILS_AT = 500_000  # a quantity: about half of a publisher's are above it


def weighed(events: DataFrame) -> DataFrame:
    """The weight of each movement, by a join; what is not sold by weight is filtered."""
    units = events.sparkSession.createDataFrame(list(GRAMS.items()), "unit string, grams bigint")
    return (
        events.join(f.broadcast(units), "unit")
        .withColumn("weight", f.col("quantity").cast("decimal(38,0)") * f.col("grams"))
        .withColumn("day", f.to_date("occurred_at"))
        .withColumn("share", f.col("quantity") / f.lit(4.0))
        .drop("grams", "stock_after")
    )


def shuffled(events: DataFrame) -> DataFrame:
    """Returns each row from another task than the one that has read its event."""
    return weighed(events.repartition(3, "event_id"))


def read_twice(events: DataFrame) -> DataFrame:
    """Reads its events twice: each share has two attempts that end."""
    others = events.select("event_id", "partition", "offset", f.col("quantity").alias("again"))
    return events.join(others.hint("merge"), ["event_id", "partition", "offset"])


def in_python(events: DataFrame) -> DataFrame:
    """Runs its own Python on Arrow's batches."""
    return events.mapInArrow(_tagged, "event_id string, partition int, offset bigint, quantity bigint, tag string")


def in_pandas(events: DataFrame) -> DataFrame:
    """Calls a function on pandas' columns, as a model's predictions do."""
    tag = pandas_udf(_hexadecimal, "string")  # type: ignore[call-overload]
    return events.select("event_id", "partition", "offset", "quantity", tag("quantity").alias("tag"))


def _hexadecimal(numbers: pd.Series) -> pd.Series:
    return numbers.map("{:08x}".format)


def in_arrow(events: DataFrame) -> DataFrame:
    """Calls a function on Arrow's columns."""
    tag = arrow_udf(_hexadecimal_in_arrow, "string")  # type: ignore[call-overload]
    return events.select("event_id", "partition", "offset", "quantity", tag("quantity").alias("tag"))


def _hexadecimal_in_arrow(numbers: pa.Array) -> pa.Array:
    return pa.array([f"{one:08x}" for one in numbers.to_pylist()], pa.string())


def _tagged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        tags = pa.array([f"{one:08x}" for one in batch["quantity"].to_pylist()], pa.string())
        names = ["event_id", "partition", "offset", "quantity"]
        yield pa.record_batch([*(batch[name] for name in names), tags], [*names, "tag"])


def in_kilograms(events: DataFrame) -> DataFrame:
    """`weighed` in kilograms, as an exact number."""
    kilograms = (f.col("weight") / 1000).cast("decimal(38, 3)")
    return weighed(events).withColumn("kilograms", kilograms).drop("weight", "day", "share", "movement_id")


def in_kilograms_shuffled(events: DataFrame) -> DataFrame:
    """Returns each row from another task than the one that has read its event."""
    return in_kilograms(events.repartition(3, "event_id"))


def weightless(events: DataFrame) -> DataFrame:
    """No event has a weight."""
    return in_kilograms(events).withColumn("kilograms", f.expr("CAST(NULL AS decimal(38, 3))"))


def picky(events: DataFrame) -> DataFrame:
    """The columns as they are; it filters events, and fails for a quantity of 13."""
    return generous(events).where("1 / (quantity - 13) < 2")


def generous(events: DataFrame) -> DataFrame:
    """`picky` after a correction."""
    return events.where(f"abs(quantity) <> {LEFT_OUT}")


def everything(events: DataFrame) -> DataFrame:
    """The columns as they are, of all events."""
    return events


def failing(events: DataFrame) -> DataFrame:
    """Fails for a quantity of 13."""
    return events.withColumn("inverse", f.expr("1 / (quantity - 13)"))


def failing_in_python(events: DataFrame) -> DataFrame:
    """Fails for a quantity of 13, in its own Python."""
    return events.mapInArrow(_failing, "event_id string, partition int, offset bigint, quantity bigint")


def _failing(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if 13 in batch["quantity"].to_pylist():
            raise ValueError("thirteen")
        yield batch.select(["event_id", "partition", "offset", "quantity"])


def unreadable(events: DataFrame) -> DataFrame:
    """Its text for a quantity of 13 is one that Postgres has none like."""
    return events.withColumn("text", f.expr("if(quantity = 13, concat('a', char(0)), 'a')"))


def always_failing(events: DataFrame) -> DataFrame:
    """Fails for every event."""
    return events.withColumn("inverse", f.expr("1 / (quantity - quantity)"))


def doubled(events: DataFrame) -> DataFrame:
    """Each event has two rows."""
    return events.union(events)


def invented(events: DataFrame) -> DataFrame:
    """Each row has another event's id."""
    return events.withColumn("event_id", f.expr("uuid()"))


def moved(events: DataFrame) -> DataFrame:
    """Each row is at another offset."""
    return events.withColumn("offset", f.col("offset") + 1_000_000)


def limited(events: DataFrame) -> DataFrame:
    """Looks at ten events only."""
    return events.limit(10)


def without_id(events: DataFrame) -> DataFrame:
    """Drops the ids."""
    return events.drop("event_id")


def with_an_array(events: DataFrame) -> DataFrame:
    """Returns an array, which no table takes."""
    return events.withColumn("numbers", f.array("quantity"))


def ambiguous(events: DataFrame) -> DataFrame:
    """Returns two columns of one name."""
    return events.select("*", f.col("quantity"))


def of_nothing(events: DataFrame) -> str:
    """Returns no DataFrame."""
    return str(events)


def corrected(events: DataFrame) -> DataFrame:
    """`failing` after a correction; it filters events too."""
    return generous(events).withColumn("inverse", f.expr("try_divide(1, quantity - 13)"))


def without_any(events: DataFrame) -> DataFrame:
    """Looks at each event, and filters all."""
    return events.where("quantity IS NULL")


def with_a_file(events: DataFrame) -> DataFrame:
    """Joins its events with a file."""
    units = events.sparkSession.read.schema("unit string, grams bigint").csv(FILE[0])
    return events.join(f.broadcast(units), "unit")


def numbered(events: DataFrame) -> DataFrame:
    """Numbers its events, by a window over all of them."""
    return events.withColumn("number", f.row_number().over(Window.partitionBy("item_id").orderBy("offset")))


def aggregated(events: DataFrame) -> DataFrame:
    """One row an item, which is said to be that of its newest event."""
    newest = ["event_id", "partition", "offset"]
    return events.groupBy("item_id").agg(
        *(f.max_by(name, "event_id").alias(name) for name in newest), f.sum("quantity").alias("quantity")
    )


def timed(events: DataFrame) -> DataFrame:
    """Adds the time at which it ran."""
    return events.withColumn("at", f.current_timestamp())


def random(events: DataFrame) -> DataFrame:
    """Adds a random number."""
    return events.withColumn("number", f.rand())


def exploded(events: DataFrame) -> DataFrame:
    """Each event has a row for each of two parts."""
    return events.withColumn("part", f.explode(f.array(f.lit("one"), f.lit("two"))))
