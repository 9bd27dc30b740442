"""The rows of a check in DuckDB, in memory up to a limit, and beyond it in a temporary folder; and the records of the
declared topics that are read into it: valid events, and records that break the contract.

Event ids are masked by a random number, so that nobody can choose ids that DuckDB hashes alike. The macro ``masked``
masks an id, and unmasks a masked one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from outbox.audit.declared import EventTopic
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.terminal import Progress
from outbox.kafka import records, topics
from outbox.kafka.records import Within
from outbox.sink.comparison_files import NUMBERS
from outbox.sink.decoding.dead_records import identity
from outbox.sink.decoding.records import Records, Rows
from outbox.sink.decoding.values import Columns

CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "512MB",
    "threads": min(os.cpu_count() or 1, 2),  # more have too little memory each
    "preserve_insertion_order": False,
    "autoinstall_known_extensions": False,
}
FETCH_ROWS = 10_000
FOLDER_PREFIX = "outbox-check-"
# A program without a file, such as `python -c`, is a notebook to DuckDB, which then draws on its standard output.
SCHEMA = """
SET enable_progress_bar = false;
CREATE MACRO masked(id) AS xor(id::UUID::UHUGEINT, {mask}::UHUGEINT)::UUID;
CREATE MACRO made_at_ms(id) AS
    CASE WHEN uuid_extract_version(masked(id)) = 7 THEN epoch_ms(uuid_extract_timestamp(masked(id))) ELSE 0 END;

-- Events on the topics, each as often as it is there. `numbers` are texts, in the order of the topic's properties.
CREATE TABLE delivered (
    topic USMALLINT, kind USMALLINT, id UUID, key VARCHAR, version BIGINT, partition INTEGER, "offset" BIGINT,
    numbers VARCHAR[]
);
-- Records that break the contract. `id` is null if `identity` is a hash.
CREATE TABLE refused (
    topic USMALLINT, identity VARCHAR, id UUID, key VARCHAR, partition INTEGER, "offset" BIGINT, reason VARCHAR,
    detail VARCHAR
);
"""
DECODED_AT_ONCE = 10_000  # records, or as many as `outbox.kafka.records` has in memory
DELIVERED = {"kind": pa.uint16(), "event_id": pa.string(), "key": pa.string(), "version": pa.int64()}
PLACE = {"partition": pa.int32(), "offset": pa.int64()}
REFUSED = pa.schema(
    {"identity": pa.string(), "key": pa.string(), **PLACE, "reason": pa.string(), "detail": pa.string()}
)
ADD_DELIVERED = """
INSERT INTO delivered
SELECT {topic}, kind, masked(event_id), key, version, partition, "offset", [{numbers}]::VARCHAR[] FROM events
"""
ADD_REFUSED = """
INSERT INTO refused
SELECT {topic}, identity, masked(TRY_CAST(identity AS UUID)), key, partition, "offset", reason, detail FROM dead
"""


class Store:
    """Tables `delivered` and `refused`, and those that a comparison makes."""

    ROWS: ClassVar = {  # the columns of rows that are compared
        **{"comparison": pa.uint16(), "sink": pa.string(), "key": pa.string()},
        **{"version": pa.int64(), "columns": pa.string()},
    }

    def __init__(self) -> None:
        self._closing = ExitStack()
        # Not with the module: `outbox check` freezes what is imported before, and DuckDB's binding complains of that.
        import duckdb

        folder = self._closing.enter_context(_temporary_folder())
        connection = duckdb.connect(config={**CONFIG, "temp_directory": str(folder)})
        self._connection = self._closing.enter_context(connection)
        self.run(SCHEMA.format(mask=secrets.randbits(128)))

    def close(self) -> None:
        """Forget everything, and delete the temporary folder."""
        self._closing.close()

    def run(self, program: str, **tables: pa.Table) -> None:
        """Run statements. They may read these Arrow tables by name."""
        with _errors():
            for name, table in tables.items():
                self._connection.register(name, table)
            self._connection.execute(program)
            for name in tables:
                self._connection.unregister(name)

    def load(
        self, name: str, types: Mapping[str, pa.DataType], rows: Iterable[Sequence[Any]], columns: str = "*"
    ) -> None:
        """Make a table of rows, in place of the last one with this name. ``columns`` are an expression of SQL."""
        schema, rows = pa.schema(types), iter(rows)
        made = f"SELECT {columns} FROM new_rows"  # noqa: S608 - of our own making
        self.run(f"CREATE OR REPLACE TABLE {name} AS {made}", new_rows=schema.empty_table())
        while some := list(islice(rows, FETCH_ROWS)):
            arrays = map(pa.array, zip(*some, strict=True), schema.types)
            self.run(f"INSERT INTO {name} {made}", new_rows=pa.table(list(arrays), schema))

    def make(self, name: str, query: str, passes: int) -> None:
        """Make a table of a query's rows in so many passes, because DuckDB does not join any number of rows within its
        memory. ``query`` has the fields ``passes`` and ``number``.
        """
        self.run(f"CREATE OR REPLACE TABLE {name} AS {query.format(passes=passes, number=-1)}")
        for number in range(passes):
            self.run(f"INSERT INTO {name} {query.format(passes=passes, number=number)}")

    def rows(self, query: str, values: Mapping[str, Any] | None = None) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, which may be more than fit into memory. Read them before the next statement."""
        with _errors():
            cursor = self._connection.execute(query, values or {})
            while rows := cursor.fetchmany(FETCH_ROWS):
                yield from rows


@contextmanager
def _errors() -> Iterator[None]:
    import duckdb

    try:
        yield
    except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
        raise Failure(
            f"no room for the rows of the check in {tempfile.gettempdir()}: {str(error).partition(chr(10))[0]}",
            "point TMPDIR at a folder with some 100 bytes free for each event of the topics and each row of the outbox",
            code="no-room",
        ) from error


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A folder that no other user can read. Also deletes folders of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    try:
        # Others look at the final name only, so they never find this folder unlocked.
        hidden = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}"))
    except OSError as error:
        raise Failure(
            f"temporary files in {tempfile.gettempdir()}: {error.strerror}",
            "point TMPDIR at a folder that can be written",
            code="no-room",
        ) from error
    with _locked(hidden):
        folder = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """A lock on a folder that ends with this process. Raises OSError if another process has it."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(lock)


# Topics --------------------------------------------------------------------------------------------------------------


@dataclass
class TopicEnd:
    """How far a topic was read."""

    topic_id: str | None = None
    next_offsets: dict[int, int] = field(default_factory=dict)
    has_gap: bool = False  # the topic has dropped records that were not read
    is_whole: bool = True  # the topic has dropped nothing yet
    dropped_until_ms: int = 0  # the topic may have dropped records that are not younger
    records: int = 0


class TopicLogs:
    """The committed records of the topics, as far as they were read. Memory does not grow with their number."""

    def __init__(self, declared: Sequence[EventTopic], ends: Mapping[str, TopicEnd] | None = None) -> None:
        """Begin where the topics do, or at the ``ends`` of what was read before."""
        self.ends = [(ends or {}).get(topic.name) or TopicEnd() for topic in declared]
        self.store = Store()
        self._topics = declared

    def close(self) -> None:
        """Delete the temporary files."""
        self.store.close()

    @property
    def records(self) -> int:
        """How many were read, of all topics."""
        return sum(end.records for end in self.ends)

    def read_on(self, settings: Settings, progress: Progress) -> None:
        """Read from where the last call stopped to the last stable offsets.

        Transaction markers and aborted records are not counted. Raises Failure if a topic was recreated meanwhile, or
        if Kafka is unavailable.
        """
        within = {topic.number: self._new(settings, topic) for topic in self._topics}
        offsets = self.records + sum(last - first for one in within.values() for first, last in one.values())
        for topic in self._topics:
            for messages in records.batches(settings, topic.name, within[topic.number], at_least=DECODED_AT_ONCE):
                self.add(topic.number, Records.of_messages(messages))
                progress(f"read {self.records:,} records of up to {offsets:,}")
            end = self.ends[topic.number]
            end.next_offsets = {number: last for number, (_, last) in within[topic.number].items()}
            dropped_until = None if end.is_whole else records.dropped_until(settings, topic.name)
            end.dropped_until_ms = 0 if dropped_until is None else int(dropped_until.timestamp() * 1000)

    def add(self, number: int, read: Records) -> None:
        """Add records of the topic with this number."""
        topic = self._topics[number]
        decoded = topic.decoder.decode(read)
        self.ends[number].records += len(read)
        events = delivered(topic, decoded.rows)
        if events.num_rows:
            numbers = ", ".join(events.column_names[len(DELIVERED) + len(PLACE) :])
            self.store.run(ADD_DELIVERED.format(topic=number, numbers=numbers), events=events)
        refused = [
            {
                "identity": identity(one.record, one.event_id),
                "key": (one.record.key or b"").decode(errors="replace"),
                "partition": one.partition,
                "offset": one.offset,
                **one.rejection._asdict(),
            }
            for one in decoded.dead
        ]
        if refused:
            self.store.run(ADD_REFUSED.format(topic=number), dead=pa.Table.from_pylist(refused, REFUSED))

    def _new(self, settings: Settings, topic: EventTopic) -> Within:
        """The offsets of a topic that were not read."""
        end, name = self.ends[topic.number], topic.name
        topic_id = topics.describe(settings, name).id
        if end.topic_id not in (None, topic_id):
            raise Failure(f"topic {name} was recreated during the check", "run the check again", code="topic-recreated")
        end.topic_id = topic_id
        watermarks = topics.watermarks(settings, name)
        end.has_gap |= any(first > end.next_offsets.get(number, first) for number, (first, _) in watermarks.items())
        end.is_whole = not any(first for first, _ in watermarks.values())
        return {
            number: (max(first, end.next_offsets.get(number, first)), last)
            for number, (first, last) in watermarks.items()
        }


def delivered(topic: EventTopic, rows: Rows) -> pa.Table:
    """Decoded events of a topic: columns of `DELIVERED` and `PLACE`, then ``n0``, ``n1``, … with the numbers of the
    topic's properties, as texts.
    """
    schema = pa.schema({**DELIVERED, **PLACE, **{f"n{place}": pa.string() for place in range(len(topic.properties))}})
    tables = [_of_kind(topic, name, columns, schema) for name, columns in rows.items()]
    return pa.concat_tables(tables) if tables else schema.empty_table()


def _of_kind(topic: EventTopic, name: str, rows: Columns, schema: pa.Schema) -> pa.Table:
    decoder, nothing = topic.decoder, [None] * len(rows["offset"])
    numeric = {column.name for column in decoder.types[name] if column.type in NUMBERS}
    columns = [
        [topic.kinds[name]] * len(nothing),
        rows["event_id"],
        rows[decoder.key],
        nothing if decoder.version is None else rows[decoder.version],
        *(rows[place] for place in PLACE),
        *(rows[one] if one in numeric else nothing for one in topic.properties),
    ]
    # Keys and numbers have types of their own in each event: here they are texts.
    cast = [pa.array(column).cast(type_) for column, type_ in zip(columns, schema.types, strict=True)]
    return pa.table(cast, schema)
