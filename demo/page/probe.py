"""Reads each part of the chain. Connections are kept, and made again after an error."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar
from uuid import UUID

import psycopg2
import requests
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Message, TopicPartition
from outbox import Failure, Settings
from outbox_lab.walkthrough import (
    Chain,
    Checkpoint,
    SinkRole,
    SourceRole,
    connect,
    connector_status,
    consumer_config,
    headers_of,
    sink_specs,
)

from demo.page.readings import (
    Batch,
    Connector,
    Down,
    Offsets,
    OutboxRow,
    Readings,
    Record,
    Sink,
    Slot,
    Source,
    Topics,
    Total,
)

T = TypeVar("T")
Row = tuple[Any, ...]

ROWS = 200  # of the outbox, the newest
RECORDS_MAX = 2_000  # of the topics at once
TAIL = 5_000  # records of each partition, when the page begins to look
BATCHES = 12  # the newest of a sink
VALUE_MAX = 4_000  # characters of a record that are kept
REQUEST_TIMEOUT_S = 2.0
KAFKA_TIMEOUT_S = 2.0
STATEMENT_TIMEOUT_MS = 10_000
MODE_EVERY_S = 10.0  # Connect validates a configuration for it

COUNTS = """
SELECT count(*), coalesce(sum(version), 0) / 2, -- a transfer has an event for each of its two accounts
       (SELECT count(*) FROM public.outbox)
  FROM source_totals
"""
# Two look-ups in the index of the ids: the outbox is not scanned.
EVENTS = """
SELECT DISTINCT ON (found.id)
       found.id::text, aggregatetype, type, schema_version, aggregateid, (payload ->> 'amount')::numeric,
       (extract(epoch FROM occurred_at) * 1000)::bigint
  FROM (SELECT * FROM (SELECT * FROM public.outbox ORDER BY id DESC LIMIT %s) AS newest
        UNION ALL
        SELECT * FROM public.outbox WHERE id = ANY (%s::uuid[])) AS found
 ORDER BY found.id
"""
OLDEST = "SELECT (extract(epoch FROM occurred_at) * 1000)::bigint FROM public.outbox ORDER BY id LIMIT 1"
SOURCE_TOTALS = "SELECT key, total, version FROM source_totals"
LSN = "SELECT pg_current_wal_insert_lsn() - '0/0'"
SLOT = """
SELECT active, coalesce(confirmed_flush_lsn - '0/0', 0), coalesce(pg_current_wal_lsn() - confirmed_flush_lsn, 0)
  FROM pg_replication_slots WHERE slot_name = %s
"""
SINKS = """
SELECT name, generation, applied, duplicates,
       (SELECT count(*) FROM public.dead_letters WHERE dead_letters.sink = sinks.name AND status = 'open')
  FROM public.sinks ORDER BY name
"""
POSITIONS = "SELECT sink, topic, partition, next_offset FROM public.positions"
SINK_TOTALS = "SELECT sink, key, total, version FROM public.sink_totals"
OUTBOX_ROW = "SELECT row_to_json(outbox)::text FROM public.outbox WHERE id = %s"


class Database:
    """A connection of a role that only reads. It is made when it is needed, and again after an error."""

    def __init__(self, settings: Settings, role: SourceRole | SinkRole) -> None:
        self._settings, self._role = settings, role
        self._connection: psycopg2.extensions.connection | None = None

    @contextmanager
    def snapshot(self) -> Iterator[Callable[..., list[Row]]]:
        """A function that runs one query, in a transaction that sees one moment."""
        try:
            if self._connection is None:
                self._connection = connect(self._settings, self._role)
                self._connection.set_session(isolation_level="REPEATABLE READ", readonly=True)
            with self._connection, self._connection.cursor() as cursor:
                cursor.execute("SET LOCAL statement_timeout = %s", [STATEMENT_TIMEOUT_MS])

                def query(statement: str, values: Sequence[object] = ()) -> list[Row]:
                    cursor.execute(statement, values)
                    return cursor.fetchall()

                yield query
        except (psycopg2.Error, Failure):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection. The next query makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Probe:
    """Reads the whole chain. One thread calls it."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._settings = settings = chain.settings
        self._source, self._sinks = Database(settings, SourceRole.AUDITOR), Database(settings, SinkRole.AUDITOR)
        self._specs = sink_specs(settings)
        self._topics = Tail(settings, settings.topic_prefix)
        self._session = requests.Session()
        self._mode: tuple[float, str, str | None] = (float("-inf"), "unknown", None)
        self._sink_urls: list[str] = []
        self._unread: list[str] = []  # events whose records are read and whose rows are not
        self._ends: dict[tuple[str, int, int], Offsets] = {}  # of batches, by sink, generation and number

    def close(self) -> None:
        """Close every connection."""
        self._source.close()
        self._sinks.close()
        self._topics.close()
        self._session.close()

    def ask_mode_again(self) -> None:
        """Ask Connect for its effective mode at the next reading."""
        self._mode = (float("-inf"), *self._mode[1:])

    def read(self) -> Readings:
        """Read every part. Sinks come first and the source last, so that the source knows all that they applied."""
        sinks = _or_down(self._read_sinks)
        topics = _or_down(self._topics.read)
        connector = _or_down(self._read_connector)
        if isinstance(connector, Down):
            self.ask_mode_again()  # it may come back in another mode
        health = _or_down(self._read_health)
        slot = _or_down(self._read_slot)
        if isinstance(topics, Topics):
            self._unread += [one.event_id for one in topics.records if one.event_id and is_uuid(one.event_id)]
        source = _or_down(self._read_source)
        return Readings(now_ms(), source, slot, connector, topics, sinks, health)

    def _read_source(self) -> Source:
        with self._source.snapshot() as query:
            [(accounts, transfers, events)] = query(COUNTS)
            rows = [_outbox_row(row) for row in query(EVENTS, [ROWS, self._unread])]
            totals = {key: Total(int(total), version) for key, total, version in query(SOURCE_TOTALS)}
            oldest = query(OLDEST)
            [(lsn,)] = query(LSN)
        self._unread = []
        return Source(accounts, int(transfers), events, int(lsn), rows, totals, int(oldest[0][0]) if oldest else None)

    def _read_slot(self) -> Slot:
        with self._source.snapshot() as query:
            found = query(SLOT, [self._settings.connector])
        if not found:
            raise Failure("there is no replication slot", code="slot-missing")
        [(is_active, confirmed, lag)] = found
        return Slot(is_active, int(confirmed), max(0, int(lag)))

    def _read_connector(self) -> Connector:
        settings = self._settings
        url = f"{settings.connect_url}/connectors/{settings.connector}/status"
        answer = self._session.get(url, timeout=REQUEST_TIMEOUT_S, auth=settings.connect_login)
        if not answer.ok:
            raise Failure(f"Connect answered {answer.status_code}", code="connect-refused")
        found = answer.json()
        tasks = [task["state"] for task in found["tasks"]]
        traces = [part["trace"] for part in (found["connector"], *found["tasks"]) if part.get("trace")]
        error = traces[0].splitlines()[0] if traces else None
        task = tasks[0] if tasks else "NONE"
        if task == "RUNNING" and time.monotonic() - self._mode[0] > MODE_EVERY_S:
            status = connector_status(settings)
            self._mode = (time.monotonic(), status.mode.partition(" (")[0], status.transaction_boundary)
        return Connector(found["connector"]["state"], task, self._mode[1], self._mode[2], error)

    def _read_health(self) -> Mapping[str, Any]:
        try:
            urls = self._sink_urls = self._sink_urls or self._chain.sink_urls()
            answers = [self._session.get(f"{url}/healthz", timeout=REQUEST_TIMEOUT_S).json() for url in urls]
        except (requests.RequestException, Failure):
            self._sink_urls = []  # a restart may have moved them
            raise
        return {name: state for answer in answers for name, state in answer["sinks"].items()}

    def _read_sinks(self) -> list[Sink]:
        with self._sinks.snapshot() as query:
            sinks, positions, totals = query(SINKS), query(POSITIONS), query(SINK_TOTALS)
        by_sink: dict[str, dict[str, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
        for sink, topic, partition, next_offset in positions:
            by_sink[sink][topic][partition] = next_offset
        totals_of = balances(totals)
        return [
            self._sink(name, generation, (applied, duplicates, set_aside), by_sink[name], totals_of.get(name))
            for name, generation, applied, duplicates, set_aside in sinks
        ]

    def _sink(
        self,
        name: str,
        generation: int,
        counts: tuple[int, int, int],
        positions: Offsets,
        totals: Mapping[str, Total] | None,
    ) -> Sink:
        spec = self._specs.get(name)
        strategy = spec.strategy.name if spec else ""
        transform = spec.job.transform.partition(":")[2] if spec and spec.job.transform else None
        batches = self._batches(Checkpoint(self._settings, name, generation), name, generation)
        return Sink(name, strategy, transform, generation, *counts, positions, totals, batches)

    def _batches(self, checkpoint: Checkpoint, sink: str, generation: int) -> list[Batch]:
        """The newest batches of a checkpoint. A planned batch does not change: its file is read once."""
        planned = checkpoint.planned()
        found, kept = [], {}
        for number in range(max(0, planned - BATCHES + 1), planned + 1):
            with suppress(OSError, ValueError, IndexError):  # it is written or deleted at this moment
                ends = self._ends.get((sink, generation, number)) or checkpoint.ends(number)
                kept[sink, generation, number] = ends
                found.append(Batch(number, ends, checkpoint.committed_at_ms(number)))
        self._ends = {place: ends for place, ends in self._ends.items() if place[0] != sink} | kept
        return found


class Tail:
    """The newest records of the topics with a prefix, each once."""

    def __init__(self, settings: Settings, prefix: str) -> None:
        self._settings, self._prefix = settings, f"{prefix}."
        self._consumer: Consumer | None = None
        self._read: dict[tuple[str, int], int] = {}  # the next offset of each partition

    def read(self) -> Topics:
        """The ends of all partitions, and what came since the last time."""
        try:
            consumer = self._consumer = self._consumer or self._opened()
            messages = consumer.consume(RECORDS_MAX, timeout=0.05)
            records = [_record(message) for message in messages if message.error() is None]
            self._read.update({(one.topic, one.partition): one.offset + 1 for one in records})
            ends: dict[str, dict[int, int]] = defaultdict(dict)
            for topic, partition in self._read:
                place = TopicPartition(topic, partition)
                _, end = consumer.get_watermark_offsets(place, timeout=KAFKA_TIMEOUT_S)
                ends[topic][partition] = end
        except KafkaException:
            self.close()
            raise
        return Topics(ends, records)

    def close(self) -> None:
        """Close the consumer. The next reading goes on where this one stopped."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _opened(self) -> Consumer:
        consumer = Consumer({**consumer_config(self._settings, "read_committed"), "auto.offset.reset": "earliest"})
        try:
            known = consumer.list_topics(timeout=KAFKA_TIMEOUT_S).topics
            places = [
                (name, partition)
                for name, topic in sorted(known.items())
                if name.startswith(self._prefix)
                for partition in sorted(topic.partitions)
            ]
            for name, partition in places:
                if (name, partition) not in self._read:
                    place = TopicPartition(name, partition)
                    _, end = consumer.get_watermark_offsets(place, timeout=KAFKA_TIMEOUT_S)
                    self._read[name, partition] = max(0, end - TAIL)
            begin = [TopicPartition(*place, offset or OFFSET_BEGINNING) for place, offset in self._read.items()]
            consumer.assign(begin)
        except KafkaException:
            consumer.close()
            raise
        return consumer


def balances(rows: Iterable[Row]) -> dict[str, dict[str, Total]]:
    """The totals by sink and key. One without a version is no balance: it is not compared with the source's."""
    found: dict[str, dict[str, Total]] = defaultdict(dict)
    for sink, key, total, version in rows:
        if version is not None:
            found[sink][key] = Total(int(total), version)
    return found


def is_uuid(text: str) -> bool:
    """Whether a text is a UUID as Postgres and the relay write it. Python's class accepts other forms too."""
    try:
        return str(UUID(text)) == text.lower()
    except ValueError:
        return False


def outbox_row(settings: Settings, event_id: str) -> str | None:
    """A row of the outbox as JSON; None if no row has this id."""
    with closing(Database(settings, SourceRole.AUDITOR)) as database, database.snapshot() as query:
        found = query(OUTBOX_ROW, [event_id])
    return str(found[0][0]) if found else None


def _outbox_row(row: Row) -> OutboxRow:
    event_id, aggregate, type_, version, key, amount, occurred_ms = row
    return OutboxRow(event_id, aggregate, type_, version, key, None if amount is None else int(amount), occurred_ms)


def _record(message: Message) -> Record:
    headers = {str(one[0]): _text(one[1]) for one in headers_of(message)}
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        event_id=headers.get("id"),
        key=_text(message.key()),
        headers=headers,
        value=_text(message.value())[:VALUE_MAX],
        at_ms=message.timestamp()[1],
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _or_down(read: Callable[[], T]) -> T | Down:
    """The result of ``read``, or why the part is down."""
    try:
        return read()
    except Failure as failure:
        return Down(failure.message.splitlines()[0])
    except psycopg2.Error:
        return Down("the database does not answer")
    except requests.RequestException:
        return Down("it does not answer")
    except KafkaException as error:
        return Down(f"Kafka: {error.args[0].str()}")


def now_ms() -> int:
    """Time of this host's clock, in milliseconds."""
    return time.time_ns() // 1_000_000


def not_readable(reason: str) -> Readings:
    """The readings of a chain of which nothing can be read."""
    down = Down(reason)
    return Readings(now_ms(), down, down, down, down, down, down)
