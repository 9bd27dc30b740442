"""A sink as the guides show it: Spark with its defaults, `from_json`, the JDBC writer in `foreachBatch`, and SQL.

A program of its own: RESULT TOPIC CHECKPOINT DSN…, the DSN as NAME=VALUE of libpq, the password in PGPASSWORD, and the
options of Spark's source in KAFKA. It runs until it is killed. It deduplicates by event id; it has no fence, no
positions, and a record that is no event stops it or becomes a null. Its result is ``balances``, or, with the join of
`sinks/turnover`, ``turnover``.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import psycopg2
from outbox.jvm.jars import jars
from psycopg2.extensions import make_dsn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

NAME = "by-the-book"
MAX_OFFSETS = "100000"  # Spark has no limit: a backlog would be one batch
EVENT = """transfer_id string, account_id string, amount bigint, currency string, balance_after bigint, version bigint,
           occurred_at string"""
TABLE = "CREATE TABLE IF NOT EXISTS book_events (event_id uuid PRIMARY KEY)"
NEW_EVENTS = """
WITH new_events AS (
    INSERT INTO book_events
    SELECT DISTINCT event_id::uuid FROM book_batch
        ON CONFLICT DO NOTHING
    RETURNING event_id
)
"""
BALANCES = """
INSERT INTO balances AS known (sink, account_id, currency, balance_minor, version, events)
SELECT %(sink)s, account_id::uuid, min(currency), sum(amount), max(version), count(*)
  FROM (SELECT DISTINCT ON (event_id) * FROM book_batch) AS batch
 WHERE event_id::uuid IN (SELECT event_id FROM new_events)
 GROUP BY account_id
    ON CONFLICT (sink, account_id) DO UPDATE
   SET balance_minor = known.balance_minor + excluded.balance_minor,
       version = greatest(known.version, excluded.version),
       events = known.events + excluded.events,
       updated_at = now()
"""
TURNOVER = """
INSERT INTO turnover AS stored (sink, day, region, currency, transfers, amount_minor, euro_cents)
SELECT %(sink)s, day, region, currency, count(*), sum(amount), sum(euro_cents)
  FROM (SELECT DISTINCT ON (event_id) * FROM book_batch) AS batch
 WHERE event_id::uuid IN (SELECT event_id FROM new_events)
 GROUP BY day, region, currency
    ON CONFLICT (sink, day, region, currency) DO UPDATE
   SET transfers = stored.transfers + excluded.transfers,
       amount_minor = stored.amount_minor + excluded.amount_minor,
       euro_cents = stored.euro_cents + excluded.euro_cents
"""
APPLY = {"balances": BALANCES, "turnover": TURNOVER}
RATES = Path(__file__).parent.parent / "sinks" / "turnover" / "rates.csv"


def main(result: str, topic: str, checkpoint: str, *dsn: str) -> None:
    """Apply the topic from its beginning, and what comes."""
    parameters = dict(one.split("=", 1) for one in dsn)
    found = ",".join(map(str, [*jars("spark"), *(jar for jar in jars("plugin") if "postgresql" in jar.name)]))
    spark = SparkSession.builder.master("local[2]").config("spark.jars", found).getOrCreate()
    options = {**json.loads(os.environ["KAFKA"]), "subscribe": topic, "startingOffsets": "earliest"}
    records = (
        spark.readStream.format("kafka")
        .options(**options, includeHeaders="true", maxOffsetsPerTrigger=MAX_OFFSETS)
        .load()
    )
    event_id = f.expr("cast(filter(headers, one -> one.key = 'id')[0].value AS string)").alias("event_id")
    event = f.from_json(f.col("value").cast("string"), EVENT).alias("event")
    events = records.select(event_id, event).select("event_id", "event.*")
    if result == "turnover":
        events = in_euros(events)

    url = "jdbc:postgresql://{host}:{port}/{dbname}".format(**parameters)
    login = {"user": parameters["user"], "password": os.environ["PGPASSWORD"]}
    access = {**login, "driver": "org.postgresql.Driver"}
    with closing(psycopg2.connect(make_dsn(**parameters))) as connection:
        with connection, connection.cursor() as cursor:
            cursor.execute(TABLE)

        def apply(batch: DataFrame, _: int) -> None:
            batch.write.jdbc(url, "book_batch", mode="overwrite", properties={**access, "truncate": "true"})
            with connection, connection.cursor() as cursor:
                cursor.execute("ANALYZE book_batch")  # else a plan for the few rows of long ago takes minutes
                cursor.execute(NEW_EVENTS + APPLY[result], {"sink": NAME})

        events.writeStream.foreachBatch(apply).option("checkpointLocation", checkpoint).start().awaitTermination()


def in_euros(events: DataFrame) -> DataFrame:
    """The transform of `sinks/turnover`."""
    schema = "currency string, region string, cents decimal(12, 8)"
    rates = events.sparkSession.read.csv(f"file://{RATES}", schema=schema, header=True)
    return (
        events.join(f.broadcast(rates), "currency", "left")
        .withColumn("euro_cents", f.bround(f.col("amount").cast("decimal(19, 0)") * f.col("cents"), 0))
        .withColumn("day", f.to_date("occurred_at"))
        .select("event_id", "day", "region", "currency", "amount", "euro_cents")
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
