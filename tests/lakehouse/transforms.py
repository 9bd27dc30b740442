"""Transforms of the events of balances: good ones, and ways to fail or to break a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RATES = {"EUR": "1", "USD": "0.8639"}
FAILS_AT = 13  # an amount
LEFT_OUT = 10**9  # the size of an amount


def in_euros(events: DataFrame) -> DataFrame:
    """The amount in euro cents, by a join; an event in another currency is left out."""
    rates = events.sparkSession.createDataFrame(list(RATES.items()), "currency string, rate string")
    cents = f.bround(f.col("amount").cast("decimal(19, 0)") * f.col("rate").cast("decimal(12, 8)"), 2)
    return (
        events.join(f.broadcast(rates), "currency")
        .withColumn("euro_cents", cents.cast("decimal(38, 2)"))
        .drop("rate", "balance_after", "transfer_id")
    )


def shuffled(events: DataFrame) -> DataFrame:
    """The same, but each row comes from another task than the one that has read its event."""
    return in_euros(events.repartition(3, "event_id"))


def without_rates(events: DataFrame) -> DataFrame:
    """No event has an amount in euro cents."""
    return in_euros(events).withColumn("euro_cents", f.expr("CAST(NULL AS decimal(38, 2))"))


def failing(events: DataFrame) -> DataFrame:
    """The same, but it fails for one amount."""
    return in_euros(events).where(f"1 / (amount - {FAILS_AT}) < 2")


def picky(events: DataFrame) -> DataFrame:
    """The columns as they are; it leaves events out, and fails for one amount."""
    return generous(events).where(f"1 / (amount - {FAILS_AT}) < 2")


def generous(events: DataFrame) -> DataFrame:
    """What `picky` has become after a correction."""
    return events.where(f"abs(amount) <> {LEFT_OUT}")


def everything(events: DataFrame) -> DataFrame:
    """The columns as they are, of all events."""
    return events


def nothing(events: DataFrame) -> DataFrame:
    """It leaves all events out."""
    return events.where("amount IS NULL")


def doubled(events: DataFrame) -> DataFrame:
    """Each event has two rows."""
    return events.union(events)


def invented(events: DataFrame) -> DataFrame:
    """Each row has another event's id."""
    return events.withColumn("event_id", f.expr("uuid()"))


def moved(events: DataFrame) -> DataFrame:
    """Each row is at another offset."""
    return events.withColumn("offset", f.col("offset") + 1_000_000)
