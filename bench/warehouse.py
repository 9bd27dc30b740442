"""Measure a target that is a function: decode records, and write them to a DuckDB file by staging and MERGE."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import discovery
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.records import Records, fetcher
from outbox.sinks import SinkJob

from bench.event import payload, uuid7

ACCOUNTS = 1_000
FILE = "BENCH_WAREHOUSE"  # the variable that names it
COLUMNS = ["event_id", "account_id", "amount", "balance_after", "version", "occurred_at"]
TABLES = [
    f"CREATE TABLE IF NOT EXISTS {name} (event_id VARCHAR, account_id VARCHAR, amount BIGINT, balance_after BIGINT, "
    "version BIGINT, occurred_at TIMESTAMPTZ)"
    for name in ("events", "balances")
]
MERGE_EVENTS = """
MERGE INTO events AS t USING staging AS s ON t.event_id = s.event_id WHEN NOT MATCHED THEN INSERT
"""
MERGE_BALANCES = """
MERGE INTO balances AS t
USING (SELECT * FROM staging QUALIFY row_number() OVER (PARTITION BY account_id ORDER BY version DESC) = 1) AS s
   ON t.account_id = s.account_id
 WHEN MATCHED AND s.version > t.version THEN UPDATE
 WHEN NOT MATCHED THEN INSERT
"""


class Rates(NamedTuple):
    """Events per second: of a sink that decodes a batch while it applies the one before, and of the writer in that."""

    strategy: str
    events: int
    per_s: int
    writer_per_s: int


def write(events: pa.Table) -> None:
    """The function."""
    with closing(duckdb.connect(os.environ[FILE])) as warehouse:
        for table in TABLES:
            warehouse.execute(table)
        warehouse.register("staging", events.select(COLUMNS))
        warehouse.execute(MERGE_EVENTS)
        warehouse.execute(MERGE_BALANCES)


def rates(settings: Settings, batches: int, batch_events: int, strategy: str) -> Rates:
    """Apply batches of new events, as a plain sink does once it has read them.

    Raises AssertionError if the warehouse does not have each event once.
    """
    os.environ[FILE] = str(settings.home / "warehouse.duckdb")
    job = SinkJob("warehouse", Path("none"), f"{__name__}:{write.__name__}", ["balance.credited"], strategy)
    spec = discovery.resolve(settings, job)
    [topic] = spec.topics
    chunking, writer_s = spec.chunking(topic), 0.0
    read = list(_records(batches, batch_events))
    with closing(connect(settings, SinkRole.WRITER)) as connection, ThreadPoolExecutor(1) as decoding:
        writer = spec.target.writer(settings, connection, spec, fetcher(settings))
        all_began = time.monotonic()
        for number, decoded in enumerate([decoding.submit(chunking.chunk, records) for records in read]):
            start, chunk = number * batch_events, decoded.result()
            began = time.monotonic()
            writer.apply(Batch(topic, "bench", {0: start}, {0: start + batch_events}, chunk))
            writer_s += time.monotonic() - began
        all_s = time.monotonic() - all_began
    events = batches * batch_events
    with closing(duckdb.connect(os.environ[FILE])) as warehouse:
        found = warehouse.execute("SELECT count(DISTINCT event_id), count(*) FROM events").fetchall()
        assert found == [(events, events)], found
    return Rates(strategy, events, round(events / all_s), round(events / writer_s))


def _records(batches: int, batch_events: int) -> Iterator[Records]:
    """Batches of records as they are read from the topic."""
    accounts = [str(uuid.uuid4()) for _ in range(ACCOUNTS)]
    versions = dict.fromkeys(accounts, 0)
    for number in range(batches):
        keys = random.choices(accounts, k=batch_events)
        values = list[bytes]()
        for key in keys:
            versions[key] += 1
            values.append(payload(key, 1, versions[key]).encode())
        yield Records(
            keys=[key.encode() for key in keys],
            headers=[_headers() for _ in keys],
            values=values,
            recorded_ms=[time.time_ns() // 1_000_000] * batch_events,
            partitions=[0] * batch_events,
            offsets=range(number * batch_events, (number + 1) * batch_events),
        )


def _headers() -> list[tuple[str, bytes | None]]:
    named: Mapping[str, str] = {"id": str(uuid7()), "eventType": "credited", "schemaVersion": "1"}
    return [(name, text.encode()) for name, text in named.items()]
