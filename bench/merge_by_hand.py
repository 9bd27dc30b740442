"""A Delta table as one would fill it by hand: `outbox.spark.events` as a DataFrame, and the sink's own MERGE.

A program of its own: TOPIC TABLE PROGRESS BATCH_EVENTS END…, each END as PARTITION=OFFSET. After each batch it writes
into the file PROGRESS how many events it has merged, and in the end it waits to be killed. It has no fence, no
positions and no dead letters.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from outbox.base.settings import load
from outbox.kafka.records import Part
from outbox.sink import discovery
from outbox.sink.spark.session import session
from outbox.sink.spark.transform import TOPIC
from outbox.spark import events_within

SINK = "lakehouse"
ROOT = Path(__file__).parent.parent
DAYS = "current_date(), current_date() - 1"  # of the events, which were made a moment ago


def main(topic: str, at: str, progress: str, batch_events: str, *ends: str) -> None:
    """Merge the topic, batch by batch."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    settings = load()
    spec = discovery.sinks(settings)[SINK]
    spark = session(settings, [spec.target]).newSession()
    spark.sql((ROOT / "sinks" / SINK / "table.sql").read_text() % {"location": f"'file://{at}'"})
    end = {int(partition): int(offset) for partition, offset in (one.split("=") for one in ends)}
    reached, merged, share = dict.fromkeys(end, 0), 0, int(batch_events) // len(end)
    while reached != end:
        until = {partition: min(reached[partition] + share, last) for partition, last in end.items()}
        events = events_within(spark, settings, spec.decoders, [Part(topic, reached, until)])
        events.drop(TOPIC).cache().createOrReplaceTempView("batch")
        [(first_id, last_id)] = spark.sql("SELECT min(event_id), max(event_id) FROM batch").collect()
        bounds = {"first_id": f"'{first_id}'", "last_id": f"'{last_id}'", "days": DAYS}
        [counted] = spark.sql(spec.strategy.select % bounds).collect()
        spark.catalog.clearCache()
        merged, reached = merged + int(counted["num_inserted_rows"]), until
        Path(progress).write_text(str(merged))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
