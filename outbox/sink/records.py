"""The one validator: a Kafka record in, an event or the reason why it is none out.

The stream, the replay of dead letters, `outbox check` and the tests all ask here. It is pure Python, records in and
Arrow tables out, so it runs wherever the records are.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import compress
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
NOT_JSON = (msgspec.DecodeError, ValueError, RecursionError)
HEADER_REASONS = {"eventType": "unknown event type", "schemaVersion": "unknown schema version"}


class Record(NamedTuple):
    """A record as Kafka has it, with the headers that `outbox.kafka.headers` can read.

    ``recorded_ms`` is its timestamp, in milliseconds since 1970.
    """

    key: bytes | None
    headers: Sequence[Header]
    value: bytes | None
    recorded_ms: int


@dataclass(frozen=True)
class Records:
    """Records of one topic as they were read: what is in `Record` column by column, and the place of each."""

    keys: Sequence[bytes | None]
    headers: Sequence[Sequence[Header]]
    values: Sequence[bytes | None]
    recorded_ms: Sequence[int]
    partitions: Sequence[int]
    offsets: Sequence[int]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> Records:
        """The records of a client."""

        def each(method: Callable[[Message], Any]) -> list[Any]:
            return list(map(method, messages))

        return cls(
            keys=each(Message.key),
            headers=each(kafka_headers.headers_of),
            values=each(Message.value),
            recorded_ms=[at_ms for _, at_ms in each(Message.timestamp)],
            partitions=each(Message.partition),
            offsets=each(Message.offset),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[tuple[Record, int, int]]:
        """Each record with its partition and offset."""
        records = map(Record, self.keys, self.headers, self.values, self.recorded_ms)
        return zip(records, self.partitions, self.offsets, strict=True)

    def parts(self, size: int) -> Iterator[Records]:
        """The same in parts of so many at most."""
        columns = tuple(vars(self).values())
        for begin in range(0, len(self), size):
            yield Records(*(column[begin : begin + size] for column in columns))


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

    def decode(self, records: Records) -> Decoded:
        """The events among records, and the others."""
        events: list[Event] = []
        places: list[tuple[int, int]] = []
        dead: list[DeadRecord] = []
        traced: list[Traced] = []
        for record, partition, offset in records:
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

    def decode_parts(self, parts: Iterable[Records]) -> Decoded:
        """The same of records that come in parts."""
        decoded = [self.decode(records) for records in parts]
        rows = pa.concat_tables([self.rows([], []), *(part.rows for part in decoded)])
        return Decoded(
            rows, [one for part in decoded for one in part.dead], [one for part in decoded for one in part.traced]
        )

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

    def decode(self, records: Records) -> Decoded:
        """As every decoder. Where all records are events they are decoded by columns, which takes half the time."""
        if len(records) > AT_ONCE:
            return self.decode_parts(records.parts(AT_ONCE))
        return self._all_events(records) or super().decode(records)

    def _all_events(self, records: Records) -> Decoded | None:
        """The events of these records; None if one of them is no event, or needs a second look."""
        values = _parse_all(records.values)
        if not values or not self._schema.are_values(values):
            return None
        try:
            headers = [
                {name: None if content is None else content.decode() for name, content in one}
                for one in records.headers
            ]
            ids = pa.array([one.get("id") for one in headers], pa.string())
            if not self._are_ids(ids, records.recorded_ms) or not self._schema.are_headers(headers):
                return None
            arrays = {
                one.name: convert_all(one.type, [value.get(one.name) for value in values]) for one in self.columns
            }
            keys = pa.array(records.keys, pa.binary()).cast(pa.string())
            if not keys.equals(arrays[self.key].cast(pa.string())):
                return None
        except ValueError:
            return None
        places = {
            "event_id": ids,
            "partition": pa.array(records.partitions, pa.int32()),
            "offset": pa.array(records.offsets, pa.int64()),
        }
        return Decoded(pa.table({**places, **arrays}), [], _traced(headers, list(places.values())))

    def _are_ids(self, ids: pa.Array, recorded_ms: Sequence[int]) -> bool:
        """Whether these can be the ids of events recorded then. Of times it looks at the first and the last only."""
        if ids.null_count or not pc.all(pc.match_substring_regex(ids, UUIDS_V7)).as_py():
            return False
        made = pc.min_max(ids).as_py()
        first_made, last_made = (made_at_ms(made[end]) for end in ("min", "max"))
        return bool(last_made - min(recorded_ms) <= FUTURE_MAX_MS and max(recorded_ms) - first_made <= self._age_max_ms)

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
    except NOT_JSON as error:
        return None, Rejection("not JSON" if _is_utf8(value) else "not UTF-8", shortened(str(error)))
    if _may_be_deep(value) and _is_deep(decoded):
        return None, Rejection("not JSON", f"nested deeper than {NESTING_MAX} levels")
    return decoded, None


def _parse_all(values: Sequence[bytes | None]) -> list[Any] | None:
    """The values of records as JSON; None if one is null, is not JSON, or is nested too deep."""
    contents = [value for value in values if value is not None]
    try:
        decoded = list(map(_JSON.decode, contents))
    except NOT_JSON:
        return None
    is_any_deep = any(map(_is_deep, compress(decoded, map(_may_be_deep, contents))))
    return None if is_any_deep or len(contents) < len(values) else decoded


def _may_be_deep(value: bytes) -> bool:
    """Whether JSON has enough brackets to be nested too deep; each level takes two bytes."""
    return len(value) > 2 * NESTING_MAX and value.count(b"[") + value.count(b"{") > NESTING_MAX


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


def _sampled_trace(headers: Mapping[str, str | None]) -> str | None:
    """The trace of a record whose sender records it, if any."""
    text = headers.get("traceparent")
    return trace.trace_id(text) if trace.is_sampled(text) else None


def _traced(headers: Sequence[Mapping[str, str | None]], places: Sequence[pa.Array]) -> list[Traced]:
    if not any("traceparent" in one for one in headers):
        return []
    rows = zip(map(_sampled_trace, headers), *(place.to_pylist() for place in places), strict=True)
    return [Traced(trace_id, *place) for trace_id, *place in rows if trace_id is not None]
