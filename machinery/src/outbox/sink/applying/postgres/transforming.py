"""The rows that a transform returns, as columns of Postgres, and joined with the events that it was given.

The sink knows each event as it was decoded, and projections see what the transform returned of it. The two are joined
by the place of the event. So the strategy, parking and dead letters go by the event as it was, whatever the transform
made of it. A row that belongs to no event, and a second one of an event, are found there too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache

from outbox.base.errors import Failure
from outbox.base.heavy import extensions, pa, pc
from outbox.events.schema import Column, SqlType
from outbox.events.values import NOT_JSON, NUL, convert, decode
from outbox.sink.applying.postgres.applier import Known, PostgresApplier, names
from outbox.sink.applying.projection import Projection
from outbox.sink.decoding import binary
from outbox.sink.decoding.batch import Batch, Returned
from outbox.sink.decoding.binary import Encoded
from outbox.sink.decoding.layout import (
    EVENT_TYPE,
    FAILURE,
    IS_FILTERED,
    KEY,
    PLACE,
    TYPE,
    VERSION,
    Layout,
    TransformedLayout,
)
from outbox.sink.decoding.records import Fetch
from outbox.sink.decoding.values import Type, arrow_types, schema_of, types_of
from outbox.sink.remembering import dead_letters, fence
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Applied

UUID = r"\A[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\z"
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,4})?", re.ASCII)
NUMBER_MAX_CHARACTERS = 4_000  # Python reads no number of more than 4,300 digits; Postgres has room for more
# What Spark and Python know; Postgres knows more.
CALENDAR = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
TRANSFORM_FAILED = "transform failed"
DROP_FILTERED = f'DELETE FROM pg_temp.new_events AS new WHERE new."{IS_FILTERED}"'  # noqa: S608
REJECT_FAILED = f"""
WITH failed AS (
    DELETE FROM pg_temp.new_events AS new WHERE new."{FAILURE}" IS NOT NULL
    RETURNING new.event_id, new."{FAILURE}" AS detail
)
INSERT INTO pg_temp.rejections (event_id, reason, detail) SELECT failed.event_id, %s, failed.detail FROM failed
"""  # noqa: S608

Apply = Callable[[str, "pa.Table"], Returned]


class TransformingApplier(PostgresApplier):
    """Applies what a transform has returned of events."""

    def __init__(
        self,
        spec: SinkSpec,
        returned: Sequence[Column],
        transform: Apply,
        projections: Sequence[Projection] | None = None,
    ) -> None:
        """``returned`` are the columns that the transform returns. ``transform`` calls it with a topic and events
        of it, for a replay. ``projections`` are by default those of the job.
        """
        super().__init__(spec, projections)
        self._shape = TransformedLayout(spec.layout, returned)
        self._columns, self._transform = returned, transform
        self._names = {
            topic: names(KEY, None if known.version is None else VERSION) for topic, known in self._known.items()
        }
        self._has_filtered = self._has_failed = False

    def rows(self, batch: Batch) -> Sequence[Encoded]:
        """The events of a batch, joined with what the transform returned of them.

        Raises Failure if the transform has broken a rule.
        """
        assert batch.returned is not None, "what the transform returned"  # noqa: S101
        known = self._known[batch.topic]
        rows = join(self.name, batch.chunk.frame, batch.returned, self._columns, known)
        self._has_filtered, self._has_failed = pc.any(rows[IS_FILTERED]).as_py(), bool(batch.returned.failed)
        known_of_all = [name for name in rows.column_names if rows[name].null_count < rows.num_rows]
        return [binary.encode_table(rows.select(known_of_all), types_of(self._shape.columns))]

    def replay(self, cursor: extensions.cursor, batch: Batch, fetch: Fetch, *, older_than_horizon: bool) -> Applied:
        """Let the events pass the transform, while no transaction is open, and apply what it returns."""
        transformed = self.transformed(cursor, batch)
        return super().replay(cursor, transformed, fetch, older_than_horizon=older_than_horizon)

    def transformed(self, cursor: extensions.cursor, batch: Batch) -> Batch:
        """The batch with what the transform returns of its events. It runs between two transactions."""
        with fence.between_transactions(cursor, self.name):
            returned = self._transform(batch.topic, batch.chunk.frame)
        return replace(batch, returned=returned)

    def _leave_out(self, cursor: extensions.cursor, count: int) -> tuple[int, int]:
        filtered = failed = 0
        if self._has_filtered:
            dead_letters.mark_filtered(cursor, self.name, count)
            cursor.execute(DROP_FILTERED)
            filtered = cursor.rowcount
        if self._has_failed:
            cursor.execute(REJECT_FAILED, [TRANSFORM_FAILED])
            failed = cursor.rowcount
        return filtered, failed


class ElsewhereApplier(TransformingApplier):
    """Applies events to a place outside the sink database, which gets only what the sink knows each event by."""

    def __init__(self, spec: SinkSpec, transform: Apply | None = None) -> None:
        super().__init__(spec, (), transform or (lambda _, events: Returned(events)), projections=())

    def rows(self, batch: Batch) -> Sequence[Encoded]:
        return super().rows(replace(batch, returned=batch.returned or Returned(batch.frame)))


def columns_of(returned: pa.Schema, events: Layout) -> Sequence[Column]:
    """The columns of Postgres, beside the place of each event. A column of the events keeps its type, if it is still
    of the same in Spark.
    """
    given = {column.name: column for column in events.columns}
    return [
        given[field.name]
        if field.name in given and arrow_types()[given[field.name].type] == field.type
        else Column(field.name, sql_type(field.type) or "numeric", is_nullable=True)
        for field in returned
        if field.name not in PLACE
    ]


def storable(rows: pa.Table, columns: Sequence[Column]) -> pa.Table:
    """Rows that Spark returns as columns of these types; decimals stay decimals. Raises ValueError for a value that a
    column does not take.
    """
    types = types_of(columns)
    rows, wanted = rows.select([*types]), schema_of(types)
    found = rows.cast(
        pa.schema(
            [ours if pa.types.is_decimal(ours.type) else new for ours, new in zip(rows.schema, wanted, strict=True)]
        )
    )
    for name, type_ in types.items():
        values = found[name].drop_null()
        try:
            if values.type == pa.string():
                values.cast(pa.binary()).cast(pa.string())  # a string of Spark may be no UTF-8
            if type_ in CHECKS and name not in PLACE and not pa.types.is_decimal(values.type):
                CHECKS[type_](values)
        except ValueError as error:
            raise ValueError(f"column {name}: {error}") from None
    return found


def join(sink: str, events: pa.Table, returned: Returned, columns: Sequence[Column], known: Known) -> pa.Table:
    """A row for each event, in the order of the events: its place, what is known of it (`outbox.sink.decoding.layout`),
    and these columns of what was returned of it, which are NULL if that is nothing.

    Raises Failure if a row belongs to no event, or if two belong to one.
    """
    failures = _failures(events, returned.failed)
    kept = _in_order(sink, events, returned.rows)
    is_missing = pc.is_null(kept["event_id"]).combine_chunks()
    types = pa.repeat(known.type_, events.num_rows) if known.type_ is not None else events[EVENT_TYPE]
    versions = pa.nulls(events.num_rows, pa.int64()) if known.version is None else events[known.version]
    return pa.table(
        {
            **{name: events[name] for name in PLACE},
            TYPE: types,
            KEY: events[known.key].cast(pa.string()),
            VERSION: versions,
            IS_FILTERED: pc.and_(is_missing, pc.is_null(failures)),
            FAILURE: failures,
            **{column.name: kept[column.name] for column in columns},
        }
    )


def _in_order(sink: str, events: pa.Table, kept: pa.Table) -> pa.Table:
    """The returned rows in the order of the events, with NULLs for an event without one."""
    if kept.select(PLACE).equals(events.select(PLACE)):
        return kept  # as mostly: nothing is filtered, and Spark has kept the order
    keys = _keys(kept)
    rows = pc.index_in(_keys(events), keys)
    if len(rows) - rows.null_count != len(keys):
        raise _broken(sink, events, kept)
    return kept.take(rows)


def _keys(rows: pa.Table) -> pa.Array:
    """The place of each row as a text."""
    texts = (rows[name].cast(pa.string()) for name in PLACE)
    return pc.binary_join_element_wise(*texts, " ", null_handling="replace", null_replacement="NULL").combine_chunks()


def _failures(events: pa.Table, failed: Mapping[tuple[int, int], str]) -> pa.Array:
    """By event how the transform failed for it; NULL for most."""
    if not failed:
        return pa.nulls(events.num_rows, pa.string())
    places = zip(events["partition"].to_pylist(), events["offset"].to_pylist(), strict=True)
    return pa.array([failed.get(place) for place in places], pa.string())


def _broken(sink: str, events: pa.Table, kept: pa.Table) -> Failure:
    """The failure of a transform that breaks a rule, with the first event of which it does."""
    known, times = {*_keys(events).to_pylist()}, Counter(_keys(kept).to_pylist())
    wrong = min(key for key, count in times.items() if key not in known or count > 1)
    problem = "several rows of one event" if wrong in known else "a row that belongs to no event of the batch"
    event_id, partition, offset = wrong.rsplit(" ", 2)
    return Failure(
        f"sink {sink}: its transform returns {problem}: event {event_id}, offset {offset} of partition {partition}",
        "return event_id, partition and offset unchanged, and at most one row per event",
        code="transform-breaks-rule",
    )


def _texts(values: pa.ChunkedArray) -> None:
    if pc.any(pc.match_substring(values, NUL)).as_py():
        raise ValueError("a text contains NUL, which Postgres has no text for")


def _documents(values: pa.ChunkedArray) -> None:
    for text in values.to_pylist():
        try:
            convert("jsonb", decode(text.encode()))
        except NOT_JSON as error:
            raise ValueError(f"no JSON: {error}") from None


def _uuids(values: pa.ChunkedArray) -> None:
    if not pc.all(pc.match_substring_regex(values, UUID), min_count=0).as_py():  # of no values it is null by default
        raise ValueError("a value is no UUID")


def _numbers(values: pa.ChunkedArray) -> None:
    for text in values.to_pylist():
        if len(text) > NUMBER_MAX_CHARACTERS or not NUMBER.fullmatch(text):
            raise ValueError("a value is no number that Postgres has room for")


def _times(values: pa.ChunkedArray) -> None:
    first, last = (pa.scalar(moment, values.type) for moment in CALENDAR)
    if pc.any(pc.or_(pc.less(values, first), pc.greater(values, last))).as_py():
        raise ValueError("a time is before the year 1 or after the year 9999")


CHECKS: Mapping[Type, Callable[[pa.ChunkedArray], None]] = {
    "text": _texts,
    "jsonb": _documents,
    "uuid": _uuids,
    "numeric": _numbers,
    "timestamptz": _times,
    "date": _times,
}


def sql_type(returned: pa.DataType) -> SqlType | None:
    """The type of a column in SQL, by its type in Arrow; None if no table takes it."""
    return "numeric" if pa.types.is_decimal(returned) else _sql_types().get(returned)


@cache
def _sql_types() -> Mapping[pa.DataType, SqlType]:
    """The type of a column in SQL, by its type in Arrow."""
    names: Sequence[SqlType] = ("text", "bigint", "double precision", "boolean", "timestamptz", "date")
    narrow: Mapping[pa.DataType, SqlType] = {**dict.fromkeys((pa.int8(), pa.int16(), pa.int32()), "bigint")}
    return {arrow_types()[name]: name for name in names} | {**narrow, pa.float32(): "double precision"}
