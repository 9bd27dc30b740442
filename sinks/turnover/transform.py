"""Amounts in euros, by a join with a table of rates."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

# `cents` are euro cents for one minor unit of the currency. A decimal, so that no cent is lost to binary fractions.
RATES = "currency string, region string, cents decimal(12, 8)"
FILE = Path(__file__).with_name("rates.csv")


def in_euros(events: DataFrame) -> DataFrame:
    """Each event with the region of its currency, its day, and its amount in euro cents.

    Cents are rounded event by event, half to even: sums are the same however events come together. A currency that has
    no rate keeps its events, with NULL for all of these, so that the projection refuses them by name.
    """
    day = f.to_date("occurred_at").alias("day")
    euro_cents = f.bround(f.col("amount").cast("decimal(19, 0)") * f.col("cents"), 0).alias("euro_cents")
    with_rates = events.join(f.broadcast(rates(events.sparkSession, FILE)), "currency", "left")
    return with_rates.select("event_id", "partition", "offset", day, "region", "currency", "amount", euro_cents)


@cache
def rates(spark: SparkSession, file: Path) -> DataFrame:
    """The rates in a file, which is read once in a session, so that no batch waits for it."""
    found = spark.read.csv(f"file://{file}", schema=RATES, header=True, mode="FAILFAST")
    return spark.createDataFrame(found.toArrow(), found.schema)
