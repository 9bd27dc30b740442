"""The one validator: it takes a Kafka record and returns an event, or the reason why the record is no event.

The stream, the replay of dead letters, `outbox check` and the tests all ask here. It is pure Python, records in and
columns out, so it runs wherever the records are.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

from outbox.base import trace
from outbox.base.trace import SampledEvents
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Wanted
from outbox.events.schema import Column, EventSchema, Rejection, shortened
from outbox.events.upcasting import UPCAST_FAILED, Upcaster
from outbox.events.values import (
    DEEP_MIN_BYTES,
    KEY_MAX_BYTES,
    NOT_JSON,
    convert,
    convert_all,
    decode,
    is_deep,
    may_be_deep,
    parse_json,
)
from outbox.kafka.spec import Header
from outbox.sink.decoding.records import DeadRecord, Decoded, Record, Records, Rows, values_at
from outbox.sink.decoding.values import are_v7, columns_of, made_at_ms, types_of

UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
UUID_V7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
DAY_MS = 24 * 60 * 60 * 1000
FUTURE_MAX_MS = DAY_MS
AT_ONCE = 1_000  # records of an event that are decoded by columns; a bad one costs its neighbours some time
AT_ONCE_EVENTS_MAX = 8
Contents = Sequence[bytes | None]  # of one header, record by record
Kind = tuple[bytes | None, bytes | None]  # event type and schema version, as the headers have them
HEADERS = ID, TYPE, VERSION = "id", "eventType", "schemaVersion"
TRACEPARENT = "traceparent"
SAMPLED = frozenset("".join(trace.SAMPLED_ENDINGS).encode())
NO_NAME = "?"  # of a skipped event whose type or version nobody can ever declare
UNKNOWN_TYPE, UNKNOWN_VERSION = "unknown event type", "unknown schema version"


class DecodedEvent(NamedTuple):
    """A valid event: its id, the values of its columns in their order, and its name as the decoder calls it."""

    event_id: str
    values: tuple[Any, ...]
    name: str


class Skipped(NamedTuple):
    """An event that was not asked for, by its name; ``*.TYPE`` for one of an undeclared type."""

    name: str


class RecordDecoder(ABC):
    """Decodes the records of one topic.

    ``types``: by the name of an event its columns, beside event id, partition and offset; ``key`` is the column that
    the record's key repeats; ``version``, if there is one, numbers the events of a key.
    """

    types: Mapping[str, Sequence[Column]]
    is_personal = False  # whether an event has personal data
    at_once = AT_ONCE  # records that are best decoded together
    declared_names: Collection[str] = ()  # of the events on the topic, asked for or not, and of their versions
    finds_sampled = False  # whether `decode` returns the sampled events, of a decoder that can
    key: str
    version: str | None = None

    @property
    def wanted_names(self) -> set[str]:
        """The names that a skipped event must not have."""
        return set(self.types)

    @property
    def wanted_versions(self) -> Mapping[str, Collection[int]]:
        """By the name of each event that is asked for, its versions, if it has any."""
        return dict.fromkeys(self.types, ())

    @abstractmethod
    def record(self, record: Record) -> DecodedEvent | Rejection | Skipped:
        """The event of a record, or why it was rejected, or that it was not asked for."""

    def bounded(self, found: DecodedEvent | Rejection | Skipped) -> DecodedEvent | Rejection | Skipped:
        """A record's event or the like, as it was found; a rejection if its key is too long for the sink's indexes."""
        if not isinstance(found, DecodedEvent):
            return found
        columns = self.types[found.name]
        place = next(place for place, column in enumerate(columns) if column.name == self.key)
        if columns[place].type != "text" or len(str(found.values[place]).encode()) <= KEY_MAX_BYTES:
            return found
        return Rejection("schema violation", f"$.{self.key}: a key of more than {KEY_MAX_BYTES} bytes")

    def event_id(self, record: Record) -> str | None:
        """The id by which a dead letter of the record is known; None if it has no UUID."""
        event_id = _text(dict(record.headers).get(ID))
        return event_id if event_id is not None and UUID.fullmatch(event_id) else None

    def decode(self, records: Records) -> Decoded:
        """The events among records, and the others."""
        events: list[tuple[DecodedEvent, int, int]] = []
        dead: list[DeadRecord] = []
        skipped: Counter[str] = Counter()
        for record, partition, offset in records:
            found = self.bounded(self.record(record))
            if isinstance(found, Skipped):
                skipped[found.name] += 1
            elif isinstance(found, DecodedEvent):
                events.append((found, partition, offset))
            else:
                dead.append(DeadRecord(partition, offset, record, self.event_id(record), found))
        return Decoded(self.rows(events), dead, skipped)

    def rows(self, read: Iterable[tuple[DecodedEvent, int, int]]) -> Rows:
        """The rows of events that were each read at a partition and an offset."""
        found = defaultdict[str, list[Sequence[Any]]](list)
        for event, partition, offset in read:
            found[event.name].append((event.event_id, partition, offset, *event.values))
        return {name: columns_of(types_of(self.types[name]), rows) for name, rows in found.items()}


class Version(NamedTuple):
    """One version of an event that is asked for: the schema of its payloads, and what makes rows of them."""

    name: str
    schema: EventSchema
    upcaster: Upcaster | None
    columns: Sequence[Column]  # of the rows


class EventDecoder(RecordDecoder):
    """Decodes the events on one topic, by their declarations.

    An id must be a UUIDv7 that is not more than a day ahead of its record and of the present, nor more than
    ``age_max_days`` behind its record: ids decide which partitions of processed_events a sink needs.
    """

    def __init__(self, aggregates: Sequence[Aggregate], wanted: Sequence[Wanted], age_max_days: int = 3660) -> None:
        """``aggregates`` are all on the topic; events of theirs that are not ``wanted`` are skipped."""
        self.types = {one.name: one.schema.columns for one in wanted}
        self.is_personal = any(schema.is_personal for one in wanted for schema, _ in one.accepts.values())
        self.key, self.version = aggregates[0].key, aggregates[0].version
        self.topic = aggregates[0].topic
        self._age_max_ms = age_max_days * DAY_MS
        self._versions = {
            (schema.type, str(version)): Version(one.name, schema, upcaster, one.schema.columns)
            for one in wanted
            for version, (schema, upcaster) in one.accepts.items()
        }
        self.at_once = AT_ONCE * min(max(len(self.types), 1), AT_ONCE_EVENTS_MAX)
        keys = (column for columns in self.types.values() for column in columns if column.name == self.key)
        self._has_text_keys = any(column.type == "text" for column in keys)
        self._takes_all = any(one.by_aggregate for one in wanted)
        self._takes_every_version = {one.schema.type for one in wanted if not one.by_version}
        schemas = [schema for aggregate in aggregates for schema in aggregate.schemas]
        self._events = {schema.type: schema.event for schema in schemas}
        self.declared_names = {name for schema in schemas for name in (schema.event, schema.name)}

    @property
    def wanted_names(self) -> set[str]:
        """The names that a skipped event must not have: of events, of versions, and of what was not declared then."""
        names = set(self.types)
        for schema in (version.schema for version in self._versions.values()):
            names |= {schema.event, schema.name, f"*.{schema.type}"}
        return names

    @property
    def wanted_versions(self) -> Mapping[str, Collection[int]]:
        """By the name of each event that is asked for, its versions."""
        found = defaultdict[str, set[int]](set)
        for one in self._versions.values():
            found[one.name].add(one.schema.version)
        return found

    def record(self, record: Record) -> DecodedEvent | Rejection | Skipped:
        """The event of a record, or why it was rejected, or that it was not asked for."""
        headers = {name: _text(content) for name, content in record.headers}
        type_, version = headers.get(TYPE), headers.get(VERSION)
        skipped = self._skipped(type_, version)
        if skipped is not None:
            return skipped
        value, rejection = parse_json(record.value)
        if rejection is not None:
            return rejection
        event_id = headers.get(ID)
        rejection = self._id_rejection(event_id, record.recorded_ms)
        if rejection is not None:
            return rejection
        known = self._versions.get((str(type_), str(version)))
        if known is None:
            return self._undeclared(type_, version)
        return self._event(known, str(event_id), record.key, value)

    def decode(self, records: Records) -> Decoded:
        """The events among records, and the others. Valid records of an event are decoded by columns, twice as fast."""
        if len(records) > self.at_once:
            return Decoded.together([self.decode(part) for part in records.parts(self.at_once)])
        headers = _by_name(records.headers, (*HEADERS, TRACEPARENT) if self.finds_sampled else HEADERS)
        kinds = _places(headers[TYPE], headers[VERSION])
        found = []
        for kind, places in kinds.items():
            type_, version = map(_text, kind)
            skipped = self._skipped(type_, version)
            if skipped is not None:
                found.append(Decoded({}, [], {skipped.name: len(places)}))
                continue
            known = self._versions.get((str(type_), str(version)))
            of_kind, contents = records, headers
            if len(kinds) > 1:
                of_kind = records.at(places)
                contents = {name: values_at(places, headers[name]) for name in headers if name not in (TYPE, VERSION)}
            decoded = None if known is None else self._all_events(known, contents[ID], of_kind)
            decoded = decoded or super().decode(of_kind)
            found.append(decoded._replace(sampled=_sampled(contents, of_kind)) if self.finds_sampled else decoded)
        return found[0] if len(found) == 1 else Decoded.together(found)

    def _event(self, known: Version, event_id: str, key: bytes | None, payload: Any) -> DecodedEvent | Rejection:
        violation = known.schema.violation(payload)
        if violation is not None:
            return Rejection("schema violation", violation.detail)
        upcast = self._upcast(known, payload)
        if isinstance(upcast, Rejection):
            return upcast
        try:
            values = tuple(convert(column.type, upcast.get(column.name)) for column in known.columns)
        except ValueError as error:
            return Rejection("schema violation", shortened(str(error)))
        own_key = next(value for value, column in zip(values, known.columns, strict=True) if column.name == self.key)
        if key != str(own_key).encode():
            return Rejection("key mismatch", f"the record's key is not its {self.key}")
        return DecodedEvent(event_id, values, known.name)

    def _upcast(self, known: Version, payload: Any) -> Any | Rejection:
        if known.upcaster is None:
            return payload
        upcast = known.upcaster.upcast(payload)
        for name in filter(None, (self.key, self.version)):
            if not isinstance(upcast, Rejection) and upcast[name] != payload[name]:
                return Rejection(UPCAST_FAILED, f"it changes the {name}, which decides the order of the events")
        return upcast

    def _all_events(self, known: Version, ids: Contents, records: Records) -> Decoded | None:
        """The events of these records; None if one of them is no event, or needs a second look."""
        values = _parse_all(records.values)
        if not values or not known.schema.are_valid(values) or not self._are_ids(ids, records.recorded_ms):
            return None
        if known.upcaster is not None:
            values = [self._upcast(known, value) for value in values]
            if any(isinstance(value, Rejection) for value in values):
                return None
        properties = _properties(values, [one.name for one in known.columns])
        try:
            columns = {
                one.name: convert_all(one.type, of_one) for one, of_one in zip(known.columns, properties, strict=True)
            }
        except ValueError:
            return None
        if [str(key).encode() for key in columns[self.key]] != [*records.keys] or self._is_any_too_long(records.keys):
            return None
        event_ids = [(one or b"").decode() for one in ids]
        place = {"event_id": event_ids, "partition": records.partitions, "offset": records.offsets}
        return Decoded({known.name: place | columns}, [])

    def _is_any_too_long(self, keys: Contents) -> bool:
        return self._has_text_keys and max(len(key or b"") for key in keys) > KEY_MAX_BYTES

    def _are_ids(self, ids: Contents, recorded_ms: Sequence[int]) -> bool:
        """Whether they are ids of events that were recorded then. Of times it looks at the first and the last only."""
        present = [one for one in ids if one is not None]
        if len(present) < len(ids) or not are_v7(present):
            return False
        ahead_ms = made_at_ms(max(present).decode()) - max(min(recorded_ms), now_ms())
        behind_ms = max(recorded_ms) - made_at_ms(min(present).decode())
        return ahead_ms <= FUTURE_MAX_MS and behind_ms <= self._age_max_ms

    def _id_rejection(self, event_id: str | None, recorded_ms: int) -> Rejection | None:
        if event_id is None:
            return Rejection("missing id", "there is no header id")
        if not UUID_V7.fullmatch(event_id):
            return Rejection("malformed id", f"header id: {shortened(repr(event_id))} is no UUIDv7")
        made_ms = made_at_ms(event_id)
        # Its time may have come since it was recorded: the clock of a service was ahead, and its events are replayed.
        if made_ms - max(recorded_ms, now_ms()) > FUTURE_MAX_MS:
            return Rejection("id from the future", f"header id: {event_id} is more than a day ahead")
        if recorded_ms - made_ms > self._age_max_ms:
            days = self._age_max_ms // DAY_MS
            return Rejection("id too old", f"header id: {event_id} is more than {days} days behind its record")
        return None

    def _skipped(self, type_: str | None, version: str | None) -> Skipped | None:
        """The event by its name, if the sink has not asked for it. An undeclared type or version may be asked for."""
        if type_ is None or (type_, str(version)) in self._versions:
            return None
        if type_ not in self._events:
            name = f"*.{type_}" if catalog.TYPE.fullmatch(type_) else NO_NAME
            return None if self._takes_all else Skipped(name)
        if type_ in self._takes_every_version:
            return None
        if all(type_ != known for known, _ in self._versions):
            return Skipped(self._events[type_])
        return Skipped(f"{self._events[type_]}.v{version}" if catalog.VERSION.fullmatch(str(version)) else NO_NAME)

    def _undeclared(self, type_: str | None, version: str | None) -> Rejection:
        if type_ in self._events:
            found = f"{shortened(repr(version))} of {type_}"
            return Rejection(UNKNOWN_VERSION, f"header schemaVersion: {found} is not declared")
        return Rejection(UNKNOWN_TYPE, f"header eventType: {shortened(repr(type_))} is not declared on {self.topic}")


def _parse_all(values: Sequence[bytes | None]) -> list[Any] | None:
    """The values of records as JSON; None if one is null, is not JSON, or is nested too deep."""
    contents = [value for value in values if value is not None]
    try:
        decoded = list(map(decode, contents))
    except NOT_JSON:
        return None
    is_any_long = max(map(len, contents), default=0) > DEEP_MIN_BYTES
    is_any_deep = is_any_long and any(map(is_deep, compress(decoded, map(may_be_deep, contents))))
    return None if is_any_deep or len(contents) < len(values) else decoded


def _properties(values: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterable[Sequence[Any]]:
    """By property its values, in one call in C for each value if they all have it."""
    if len(names) > 1:
        with suppress(KeyError):
            return list(zip(*map(itemgetter(*names), values), strict=True))
    return [[value.get(name) for value in values] for name in names]


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _sampled(headers: Mapping[str, Contents], records: Records) -> SampledEvents:
    """The sampled events of these records."""
    traceparents = headers[TRACEPARENT]
    found = [place for place, content in enumerate(traceparents) if content and content[-1] in SAMPLED]
    first = [
        (traceparents[place] or b"", headers[ID][place], records.recorded_ms[place])
        for place in found[: trace.LINKS_MAX]
    ]
    return SampledEvents(first, len(found))


def _by_name(headers: Sequence[Sequence[Header]], wanted: Sequence[str]) -> Mapping[str, Contents]:
    """The contents of each wanted header, by its name, record by record."""
    none = (None,) * len(headers)
    if len({*map(len, headers)}) == 1:
        # Mostly all records have the same headers in one order: then a few calls in C do it.
        columns = [tuple(zip(*column, strict=True)) for column in zip(*headers, strict=True)]
        found: dict[str, Contents] = {names[0]: contents for names, contents in columns}
        if len(found) == len(columns) and all(_are_same(names) for names, _ in columns):
            return {name: found.get(name, none) for name in wanted}
    dicts = list(map(dict, headers))
    return {name: [one.get(name) for one in dicts] for name in wanted}


def _are_same(contents: Sequence[Any]) -> bool:
    return contents.count(contents[0]) == len(contents)


def _places(types: Contents, versions: Contents) -> Mapping[Kind, Sequence[int]]:
    """The places of each kind. Mostly there is one kind, which is faster to see at once."""
    if types and _are_same(types) and _are_same(versions):
        return {(types[0], versions[0]): range(len(types))}
    found = defaultdict[Kind, list[int]](list)
    for place, kind in enumerate(zip(types, versions, strict=True)):
        found[kind].append(place)
    return found
