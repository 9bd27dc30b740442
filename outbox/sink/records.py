"""The one validator: a Kafka record in, an event or the reason why it is none out.

The stream, the replay of dead letters, `outbox check` and the tests all ask here. It is pure Python on Arrow tables, so
it runs wherever the records are.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from outbox.base import trace
from outbox.base.errors import Failure
from outbox.kafka import headers as kafka_headers
from outbox.sink.batch import DeadRecord, Decoded, Traced
from outbox.sink.values import ARROW_TYPES, convert, convert_all
from outbox.writing.contract import Column, EventSchema, SqlType, shortened

Header = kafka_headers.Header

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
UUID_V7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
UUIDS_V7 = rf"\A{UUID_V7.pattern}\z"  # for Arrow
PLACE = {"event_id", "partition", "offset"}  # columns of every batch
KEY_TYPES: set[SqlType] = {"uuid", "text", "bigint"}  # of which a record's key is the text
EXPONENT_MAX = 100  # no column holds a larger number, and writing out 1e999999 takes a while
NUMBER_MAX_CHARACTERS = 1000  # Postgres has room for 16,383 digits behind the point
NESTING_MAX = 200  # the validator fails beyond 255; how much Python itself takes depends on its version
DAY_MS = 24 * 60 * 60 * 1000
FUTURE_MAX_MS = DAY_MS
AT_ONCE = 1_000  # records that are decoded by columns; a bad one costs its neighbours some time
HEADER_REASONS = {"eventType": "unknown event type", "schemaVersion": "unknown schema version"}
KAFKA_COLUMNS = ("key", "value", "headers", "partition", "offset", "timestamp")
HEADER = pa.struct([("key", pa.string()), ("value", pa.binary())])


class Record(NamedTuple):
    """A record as Kafka has it, with the headers that `outbox.kafka.headers` can read.

    ``recorded_ms`` is its timestamp, in milliseconds since 1970.
    """

    key: bytes | None
    headers: Sequence[Header]
    value: bytes | None
    recorded_ms: int


class Event(NamedTuple):
    """A valid event: its id, and the values of the decoder's columns in their order."""

    event_id: str
    values: tuple[Any, ...]


class Rejection(NamedTuple):
    """Why a record is no event: the kind of fault, from a short list to filter by, and a detail for people."""

    reason: str
    detail: str


class RecordDecoder(ABC):
    """Decodes the records of one topic. ``columns`` are those of the batch, beside event id, partition and offset;
    ``key`` is the column that the record's key repeats; ``version``, if there is one, numbers the events of a key.
    """

    columns: Sequence[Column]
    key: str
    version: str | None = None
    quantity: str | None = None

    @abstractmethod
    def record(self, record: Record) -> Event | Rejection:
        """The event of a record, or why it is none."""

    def event_id(self, record: Record) -> str | None:
        """The id by which a dead letter of the record is known; None if it has no UUID."""
        event_id = _text(dict(record.headers).get("id"))
        return event_id if event_id is not None and UUID.fullmatch(event_id) else None

    def as_json(self, event: Event, partition: int, offset: int) -> str:
        """The event as a JSON object of the batch's columns. Numbers keep all their digits."""
        row: dict[str, Any] = {"event_id": event.event_id, "partition": partition, "offset": offset}
        for column, value in zip(self.columns, event.values, strict=True):
            row[column.name] = msgspec.Raw(value.encode()) if column.type == "jsonb" and value is not None else value
        return msgspec.json.encode(row).decode()

    def decode(self, table: pa.Table | pa.RecordBatch) -> Decoded:
        """The events and the other records of a table with the columns of Spark's Kafka source (with headers)."""
        events: list[Event] = []
        places: list[tuple[int, int]] = []
        dead: list[DeadRecord] = []
        traced: list[Traced] = []
        for record, partition, offset in _records(table):
            found = self.record(record)
            if isinstance(found, Event):
                events.append(found)
                places.append((partition, offset))
                event_id: str | None = found.event_id
            else:
                event_id = self.event_id(record)
                dead.append(DeadRecord(partition, offset, record, event_id, found))
            trace_id = _sampled_trace({name: _text(content) for name, content in record.headers})
            if trace_id is not None:
                traced.append(Traced(trace_id, event_id, partition, offset, isinstance(found, Rejection)))
        return Decoded(self.rows(events, places), dead, traced)

    def rows(self, events: Sequence[Event], places: Sequence[tuple[int, int]]) -> pa.Table:
        """The batch's rows of events that were read at these places (partition, offset)."""
        arrays = {
            "event_id": pa.array([event.event_id for event in events], pa.string()),
            "partition": pa.array([partition for partition, _ in places], pa.int32()),
            "offset": pa.array([offset for _, offset in places], pa.int64()),
        }
        values = zip(*(event.values for event in events), strict=True) if events else ([] for _ in self.columns)
        for column, of_column in zip(self.columns, values, strict=True):
            arrays[column.name] = pa.array(of_column, ARROW_TYPES[column.type])
        return pa.table(arrays)


class EventDecoder(RecordDecoder):
    """Decodes events of the outbox by their JSON Schema.

    An id must be a UUIDv7 that is not more than a day ahead of its record, nor more than ``age_max_days`` behind it:
    ids decide which partitions of processed_events a sink needs.
    """

    def __init__(
        self,
        schema: EventSchema,
        key: str,
        version: str | None = None,
        quantity: str | None = None,
        age_max_days: int = 3660,
    ) -> None:
        """``key``, ``version`` and ``quantity`` are names of properties. Raises Failure if one cannot be that."""
        self.columns = schema.columns
        _require_usable(schema, key, version, quantity)
        self.key, self.version, self.quantity = key, version, quantity
        self._schema = schema
        self._key_place = [column.name for column in schema.columns].index(key)
        self._age_max_ms = age_max_days * DAY_MS

    def record(self, record: Record) -> Event | Rejection:
        """The event of a record, or why it is none."""
        value, rejection = parse_json(record.value)
        if rejection is not None:
            return rejection
        headers = {name: _text(content) for name, content in record.headers}
        event_id = headers.get("id")
        rejection = self._id_rejection(event_id, record.recorded_ms) or self._contract_rejection(headers, value)
        if rejection is not None:
            return rejection
        try:
            values = tuple(convert(column.type, value.get(column.name)) for column in self.columns)
        except ValueError as error:
            return Rejection("schema violation", shortened(str(error)))
        if record.key != str(values[self._key_place]).encode():
            return Rejection("key mismatch", f"the record's key is not its {self.key}")
        return Event(str(event_id), values)

    def decode(self, table: pa.Table | pa.RecordBatch) -> Decoded:
        """As every decoder. Where all records are events they are decoded by columns, which takes half the time."""
        parts = [
            self._all_events(records) or super(EventDecoder, self).decode(records)
            for batch in (table.to_batches() if isinstance(table, pa.Table) else [table])
            for records in (batch.slice(begin, AT_ONCE) for begin in range(0, batch.num_rows, AT_ONCE))
        ]
        rows = pa.concat_tables([self.rows([], []), *(part.rows for part in parts)])
        return Decoded(
            rows, [one for part in parts for one in part.dead], [one for part in parts for one in part.traced]
        )

    def _all_events(self, records: pa.RecordBatch) -> Decoded | None:
        """The events of these records; None if one of them is no event, or needs a second look."""
        values = [value for value, rejection in map(parse_json, records["value"].to_pylist()) if rejection is None]
        if len(values) < records.num_rows or any(map(self._schema.value_violation, values)):
            return None
        try:
            headers = _headers(records["headers"])
            ids = pa.array((one.get("id") for one in headers), pa.string())
            if not self._are_ids(ids, records["timestamp"]) or any(map(self._schema.header_violation, headers)):
                return None
            arrays = {
                one.name: convert_all(one.type, [value.get(one.name) for value in values]) for one in self.columns
            }
            if not records["key"].cast(pa.string()).equals(arrays[self.key].cast(pa.string())):
                return None
        except ValueError:
            return None
        places = {"event_id": ids, "partition": records["partition"], "offset": records["offset"]}
        return Decoded(pa.table({**places, **arrays}), [], _traced(headers, list(places.values())))

    def _are_ids(self, ids: pa.Array, recorded: pa.Array) -> bool:
        """Whether these can be the ids of events recorded then. Of times it looks at the first and the last only."""
        if ids.null_count or not pc.all(pc.match_substring_regex(ids, UUIDS_V7)).as_py():
            return False
        made, at = pc.min_max(ids).as_py(), pc.min_max(_milliseconds(recorded)).as_py()
        first_made, last_made = (made_at_ms(made[end]) for end in ("min", "max"))
        return bool(last_made - at["min"] <= FUTURE_MAX_MS and at["max"] - first_made <= self._age_max_ms)

    def _id_rejection(self, event_id: str | None, recorded_ms: int) -> Rejection | None:
        if event_id is None:
            return Rejection("missing id", "there is no header id")
        if not UUID_V7.fullmatch(event_id):
            return Rejection("malformed id", f"header id: {shortened(repr(event_id))} is no UUIDv7")
        ahead_ms = made_at_ms(event_id) - recorded_ms
        if ahead_ms > FUTURE_MAX_MS:
            return Rejection("id from the future", f"header id: {event_id} is more than a day ahead of its record")
        if -ahead_ms > self._age_max_ms:
            days = self._age_max_ms // DAY_MS
            return Rejection("id too old", f"header id: {event_id} is more than {days} days behind its record")
        return None

    def _contract_rejection(self, headers: dict[str, str | None], value: Any) -> Rejection | None:
        violation = self._schema.header_violation(headers)
        if violation is not None:
            return Rejection(HEADER_REASONS.get(violation.name, "schema violation"), violation.detail)
        violation = self._schema.value_violation(value)
        return None if violation is None else Rejection("schema violation", violation.detail)


def as_table(messages: Sequence[Message]) -> pa.Table:
    """Records of a client as the columns of Spark's Kafka source."""
    return pa.table(
        {
            "key": pa.array([message.key() for message in messages], pa.binary()),
            "value": pa.array([message.value() for message in messages], pa.binary()),
            "headers": pa.array(
                [
                    [{"key": name, "value": content} for name, content in kafka_headers.headers_of(message)]
                    for message in messages
                ],
                pa.list_(HEADER),
            ),
            "partition": pa.array([message.partition() for message in messages], pa.int32()),
            "offset": pa.array([message.offset() for message in messages], pa.int64()),
            "timestamp": pa.array([message.timestamp()[1] for message in messages], pa.timestamp("ms", tz="UTC")),
        }
    )


def _require_usable(schema: EventSchema, key: str, version: str | None, quantity: str | None) -> None:
    columns = {column.name: column for column in schema.columns}
    wanted: list[tuple[str, str | None, set[SqlType]]] = [
        ("key", key, KEY_TYPES),
        ("version", version, {"bigint"}),
        ("quantity", quantity, {"bigint", "numeric"}),
    ]
    for use, name, types in wanted:
        if name is not None and (name not in columns or columns[name].is_nullable or columns[name].type not in types):
            raise Failure(
                f"event schema {schema.name}: {name} cannot be the {use} of its events",
                f"the {use} is a required property that is never null and becomes {' or '.join(sorted(types))}; an "
                "integer becomes bigint if minimum and maximum keep it within 64 bits",
                code="event-declaration-unusable",
            )
    reserved = sorted(PLACE & columns.keys())
    if reserved:
        raise Failure(
            f"event schema {schema.name}: {', '.join(reserved)} is a column of every batch",
            "give the property another name",
            code="event-declaration-unusable",
        )


def made_at_ms(event_id: str) -> int:
    """The time inside a UUIDv7, in milliseconds since 1970."""
    return int(event_id[:8] + event_id[9:13], 16)


def parse_json(value: bytes | None) -> tuple[Any, Rejection | None]:
    """A record's value as JSON, or why it is none. Numbers with a point or an exponent are exact decimals."""
    if value is None:
        return None, Rejection("no value", "the value is null: a tombstone is no event")
    try:
        decoded = _JSON.decode(value)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return None, Rejection("not JSON" if _is_utf8(value) else "not UTF-8", shortened(str(error)))
    if value.count(b"[") + value.count(b"{") > NESTING_MAX and _is_deep(decoded):
        return None, Rejection("not JSON", f"nested deeper than {NESTING_MAX} levels")
    return decoded, None


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_deep(decoded: Any) -> bool:
    nested = [decoded] if isinstance(decoded, dict | list) else []
    for _ in range(NESTING_MAX):
        children = (child for value in nested for child in (value.values() if isinstance(value, dict) else value))
        nested = [child for child in children if isinstance(child, dict | list)]
    return bool(nested)


def _number(text: str) -> Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # its exponent has too many digits
        number = None
    if number is None or abs(number.adjusted()) > EXPONENT_MAX or len(text) > NUMBER_MAX_CHARACTERS:
        raise ValueError(f"the number {shortened(text)} is out of range")
    return number


_JSON = msgspec.json.Decoder(float_hook=_number)


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace")


def _headers(lists: pa.ListArray) -> list[dict[str, str | None]]:
    """The headers of each record. Raises ValueError if a name or a value is no UTF-8."""
    flat = lists.flatten()
    if pc.any(pc.match_substring(flat.field(0), kafka_headers.REPLACEMENT)).as_py():
        raise ValueError("the name of a header is no UTF-8")
    pairs = zip(flat.field(0).to_pylist(), flat.field(1).cast(pa.string()).to_pylist(), strict=True)
    return [dict(islice(pairs, count)) for count in lists.value_lengths().fill_null(0).to_pylist()]


def _sampled_trace(headers: Mapping[str, str | None]) -> str | None:
    """The trace of a record whose sender records it, if any."""
    text = headers.get("traceparent")
    return trace.trace_id(text) if trace.is_sampled(text) else None


def _traced(headers: Sequence[Mapping[str, str | None]], places: Sequence[pa.Array]) -> list[Traced]:
    if not any("traceparent" in one for one in headers):
        return []
    rows = zip(map(_sampled_trace, headers), *(place.to_pylist() for place in places), strict=True)
    return [Traced(trace_id, *place) for trace_id, *place in rows if trace_id is not None]


def _milliseconds(timestamps: pa.Array) -> pa.Array:
    return timestamps.cast(pa.timestamp("ms", tz="UTC")).cast(pa.int64())


def _records(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[Record, int, int]]:
    """Each record with its partition and offset. Headers are flattened once: a list of dicts each would be slow."""
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    for batch in batches:
        columns = {name: batch.column(batch.schema.get_field_index(name)) for name in KAFKA_COLUMNS}
        headers = columns["headers"]
        flat = headers.flatten()
        names, contents = flat.field(0).to_pylist(), flat.field(1).to_pylist()
        lengths = headers.value_lengths().fill_null(0).to_pylist()
        recorded = _milliseconds(columns["timestamp"]).to_pylist()
        begin = 0
        for key, value, count, partition, offset, recorded_ms in zip(
            columns["key"].to_pylist(),
            columns["value"].to_pylist(),
            lengths,
            columns["partition"].to_pylist(),
            columns["offset"].to_pylist(),
            recorded,
            strict=True,
        ):
            end = begin + count
            own = kafka_headers.readable(list(zip(names[begin:end], contents[begin:end], strict=True)))
            begin = end
            yield Record(key, own, value, recorded_ms), partition, offset
