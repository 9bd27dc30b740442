"""`outbox sink` with a fault that nobody can cause from outside: the first argument names it, the others are outbox's.

    python -m tests.support.faulty_sink FAULT[:PARAMETER…] sink --plain copies

Everything else of the process is the product's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import wait_for
from outbox.cli import main
from outbox.kafka import transactions
from outbox.kafka.follower import Closed
from outbox.kafka.records import Part
from outbox.sink import discovery
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.decoding.batch import Batch
from outbox.sink.remembering import fence
from outbox.sink.running import plain, query, stream, supervisor, watchdog
from outbox.sink.running.checkpoint import Checkpoint
from outbox.sink.spark import reader
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sink.writer import Counts
from tests.support.topic_reader import drop_records

TIMEOUT_S = 60
REFUSED = "refused by the fault"
PART_RECORDS = 150  # more than a driver reads itself


def commit_unseen() -> None:
    """The sink `naive` never sees that Spark has committed a batch."""
    sees = Checkpoint.is_committed

    def is_committed(self: Checkpoint, batch_id: int) -> bool:
        return not self.uri.endswith("/naive") and sees(self, batch_id)

    patch(Checkpoint, is_committed=is_committed)
    patch(query, COMMIT_TIMEOUT_S=1)


def stop_before_apply() -> None:
    """The process is asked to stop when it has read a batch and not begun to apply it. Spark gets the time to record
    what the apply makes of that.
    """
    read, stop = query.Query.read_part, query.Query.stop_query

    def read_until_stop(self: query.Query, waiting: deque[Part]) -> tuple[Batch, float]:
        found = read(self, waiting)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for("the stop", lambda: self.is_stopping, timeout_s=TIMEOUT_S)
        return found

    def stop_late(self: query.Query, of: StreamingQuery) -> None:
        wait_for(
            "Spark to end or to commit",
            lambda: not self.is_active() or self._checkpoint.is_committed(0),
            timeout_s=TIMEOUT_S,
        )
        stop(self, of)

    patch(query.Query, read_part=read_until_stop, stop_query=stop_late)


def short_waits() -> None:
    """A lock is waited for during a second, and a sink that has failed starts again at once."""
    patch(fence, SESSION=fence.SESSION + "SET lock_timeout = '1s';")
    patch(supervisor, FIRST_DELAY_S=0.1, MAX_DELAY_S=0.1)


def short_silence() -> None:
    """A database that does not answer is given up after a second or two."""
    patch(watchdog, POLL_S=0.1, SILENCE_S=1.0, ANSWER_TIMEOUT_S=0.5)


def few_retries() -> None:
    """Short waits, and the third failure in a row is the last one."""
    short_waits()
    patch(supervisor, FAILURES_MAX=3)


def death_between_parts() -> None:
    """The process is killed when the sink `naive` has applied one part of a batch, and is about to apply the next."""
    signal_at_part(signal.SIGKILL, "naive", 2)


def transformed() -> None:
    """The sink `lakehouse` has a transform."""
    change("lakehouse", transform="tests.transforms:picky")


def topic_targets() -> None:
    """The sinks are those that write to topics."""
    from tests.support import topic_sinks

    patch(discovery, jobs=topic_sinks.jobs)


def signal_in_transaction(step: str, which: str, number: str) -> None:
    """A signal hits the process, whose sinks write to topics, behind this step of the transaction of this number."""
    from tests.support import topic_sinks

    is_behind_records = step == "produce"  # behind all of them, before the next step
    name = "send_offsets_to_transaction" if is_behind_records else step
    take, numbers = getattr(Producer, name), Counter[Producer]()

    def hit(producer: Producer) -> None:
        numbers[producer] += 1
        if numbers[producer] == int(number):
            print(topic_sinks.FIRED, file=sys.stderr, flush=True)  # noqa: T201
            # To this thread: with a stop of the process alone, it would go on until another thread has taken that.
            signal.pthread_kill(threading.get_ident(), signal.Signals[which])

    def take_and_hit(self: Producer, *arguments: Any) -> None:
        if is_behind_records:
            self.flush(TIMEOUT_S)
            hit(self)
        take(self, *arguments)
        if not is_behind_records:
            hit(self)

    topic_targets()
    patch(transactions, Producer=type("Hit", (Producer,), {name: take_and_hit}))
    patch(plain, PART_MAX_RECORDS=topic_sinks.PART_RECORDS)


def function_target() -> None:
    """The sink `dedup` has a function as its target."""
    change("dedup", target="tests.targets:write", projections=Path("none"))


def function_behind_transform() -> None:
    """The sink `dedup` has a function as its target, and a transform before it."""
    change("dedup", target="tests.targets:write", projections=Path("none"), transform="tests.transforms:picky")


def death_behind_a_function() -> None:
    """The process is killed when the function has written a batch: the sink database does not know of it."""
    function_target()
    write = FunctionTarget.write

    def write_last(self: FunctionTarget, spec: SinkSpec, events: Any) -> Mapping[str, str]:
        write(self, spec, events)
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    patch(FunctionTarget, write=write_last)


def iceberg() -> None:
    """The sink `lakehouse` has an Iceberg table."""
    from tests import lake

    change("lakehouse", **lake.iceberg(load().home))


def death_behind_a_commit_of_iceberg() -> None:
    """The process is killed behind the first commit of its Iceberg table."""
    iceberg()
    _die_behind_a_merge()


def death_behind_a_merge() -> None:
    """The process is killed behind the table's first commit: the positions do not know of it."""
    transformed()
    _die_behind_a_merge()


def _die_behind_a_merge() -> None:
    table: Any = import_module("outbox.sink.applying.lakehouse.spark_table").Table
    merge = table.merge

    def merge_last(*arguments: Any) -> None:
        merge(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    patch(table, merge=merge_last)


def without_orders() -> None:
    """An earlier deployment: the sink `activity` asks for events of items only."""
    change("activity", events=["item"])


def stop_in_first_part() -> None:
    """The process is asked to stop when it applies the first part of a batch."""
    signal_at_part(signal.SIGTERM, "dedup", 1)


def unread_part() -> None:
    """The second part of a batch cannot be read, and the first one's apply takes longer than that."""
    patch(reader, PART_MAX_RECORDS=PART_RECORDS)
    read, apply, parts, refused = reader.Reader.read, PostgresWriter.apply, count(1), threading.Event()

    def read_one(self: reader.Reader, spark: SparkSession, waiting: deque[Part]) -> Batch:
        if next(parts) == 2:
            refused.set()
            raise Failure(REFUSED)
        return read(self, spark, waiting)

    def apply_late(self: PostgresWriter, batch: Batch) -> Counts:
        refused.wait(TIMEOUT_S)
        return apply(self, batch)

    patch(reader.Reader, read=read_one)
    patch(PostgresWriter, apply=apply_late)


def dropped_records() -> None:
    """The topic drops its first records between the plan of a batch and the read."""
    read = reader.Reader.read

    def read_late(self: reader.Reader, spark: SparkSession, waiting: deque[Part]) -> Batch:
        part = waiting[0]
        for partition in (partition for partition, end in part.end.items() if end):
            drop_records(self._settings, part.topic, 1, partition)
        return read(self, spark, waiting)

    patch(reader.Reader, read=read_late)


def endless_apply() -> None:
    """The process is asked to stop while the database does not end an apply."""

    def apply(self: PostgresWriter, batch: Batch) -> Counts:
        os.kill(os.getpid(), signal.SIGTERM)
        with self._connection, self._connection.cursor() as cursor:
            cursor.execute("SELECT pg_sleep_for('1 hour')")
        raise AssertionError("it sleeps longer than anybody waits")

    patch(stream, APPLY_TIMEOUT_S=2.0)
    patch(PostgresWriter, apply=apply)


def failure_beside_endless_read() -> None:
    """The first part of a batch is refused while the second one is read, which ends with the process only."""
    patch(reader, PART_MAX_RECORDS=PART_RECORDS)
    read, close, parts, is_closed = reader.Reader.read, reader.Reader.close, count(1), threading.Event()

    def read_one(self: reader.Reader, spark: SparkSession, waiting: deque[Part]) -> Batch:
        if next(parts) == 1:
            return read(self, spark, waiting)
        is_closed.wait(TIMEOUT_S)
        raise Closed

    def close_and_tell(self: reader.Reader) -> None:
        close(self)
        is_closed.set()

    def apply(self: PostgresWriter, batch: Batch) -> Counts:
        raise Failure(REFUSED)

    patch(stream, APPLY_TIMEOUT_S=2.0)
    patch(reader.Reader, read=read_one, close=close_and_tell)
    patch(PostgresWriter, apply=apply)


def signal_at_part(which: signal.Signals, sink: str, number: int) -> None:
    """The process gets a signal when a sink is about to apply this part of its first batch."""
    patch(reader, PART_MAX_RECORDS=PART_RECORDS)
    apply, parts = stream.Stream.apply_part, count(1)

    def apply_one(self: stream.Stream, batch_id: int, batch: Batch, read_s: float) -> None:
        if self._spec.name == sink and next(parts) == number:
            signal.pthread_kill(threading.get_ident(), which)  # else this thread might go on for a while
        apply(self, batch_id, batch, read_s)

    patch(stream.Stream, apply_part=apply_one)


def change(sink: str, **attributes: Any) -> None:
    """The job of a sink has other attributes."""
    jobs = discovery.jobs

    def changed(settings: Settings) -> list[SinkJob]:
        return [replace(job, **attributes) if job.name == sink else job for job in jobs(settings)]

    patch(discovery, jobs=changed)


def patch(owner: object, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


if __name__ == "__main__":
    fault, *parameters = sys.argv.pop(1).split(":")
    globals()[fault](*parameters)
    main()
