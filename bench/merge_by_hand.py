"""A Delta table as one would fill it by hand: the topic's events as a DataFrame, and the sink's own MERGE.

A program of its own: TOPIC TABLE PROGRESS BATCH_EVENTS END…, each END as PARTITION=OFFSET. After each batch it writes
into the file PROGRESS how many events it has merged, and in the end it waits to be killed. It has no fence, no
positions and no dead letters.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from outbox.base.settings import Settings, load
from outbox.kafka.records import Part, batches
from outbox.sink import discovery
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.layout import Layout
from outbox.sink.decoding.records import Records
from outbox.sink.spark.session import session
from pyspark.sql.pandas.types import from_arrow_schema

SINK = "lakehouse"
ROOT = Path(__file__).parent.parent
DAYS = "current_date(), current_date() - 1"  # of the events, which were made a moment ago
TASK_MAX_RECORDS = 200_000


@dataclass(frozen=True)
class EventsTask:
    """The function that an executor runs for the numbers of shares: it reads and decodes them."""

    settings: Settings
    decoder: RecordDecoder
    layout: Layout
    shares: Sequence[Part]

    def __call__(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The events of these shares."""
        for batch in numbers:
            for number in batch["id"].to_pylist():
                share, at_once = self.shares[number], self.decoder.at_once
                for messages in batches(self.settings, share.topic, share.within, at_least=at_once, require_all=True):
                    rows = self.decoder.decode(Records.of_messages(messages)).rows
                    yield from self.layout.table(rows).combine_chunks().to_batches()


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
        shares = Part(topic, reached, until).in_parts(TASK_MAX_RECORDS)
        read = EventsTask(settings.without_secrets("kafka_password"), spec.decoders[topic], spec.layout, shares)
        numbers = spark.range(0, len(shares), 1, len(shares))
        events = numbers.mapInArrow(read, from_arrow_schema(spec.layout.schema))
        events.cache().createOrReplaceTempView("batch")
        [(first_id, last_id)] = spark.sql("SELECT min(event_id), max(event_id) FROM batch").collect()
        bounds = {"first_id": f"'{first_id}'", "last_id": f"'{last_id}'", "days": DAYS}
        [counted] = spark.sql(spec.strategy.select % bounds).collect()
        spark.catalog.clearCache()
        merged, reached = merged + int(counted["num_inserted_rows"]), until
        Path(progress).write_text(str(merged))
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
