"""How the events of a sink lie in its temporary tables: ``outbox_batch`` and ``new_events``.

The tables have the columns of all event types of the sink. Columns of one name and one SQL type are one column; where
types differ, the column's name is followed by its type, as in ``price:numeric``. A sink of several event types has one
more column, ``event_type``, with the event's name. A column that an event type lacks is NULL. No property may be
called ``event_type``, or begin with ``outbox_``, as other columns of ours do (`outbox.events.catalog`).

For each event type there is a view over ``new_events`` with just that type's columns, under their own names:
``new_order_placed`` for the event ``order.placed``, ``new_order_placed_v1`` if that version is asked for alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from outbox.base.errors import Failure
from outbox.base.heavy import pa, sql
from outbox.events.catalog import COLUMNS_MAX, LIMIT, ROW_MAX_BYTES, row_bytes
from outbox.events.schema import Column
from outbox.sink.decoding.decoder import RecordDecoder
from outbox.sink.decoding.records import Rows
from outbox.sink.decoding.values import PLACE_TYPES, Columns, as_table, schema_of, types_of

EVENT_TYPE = "event_type"
# What a sink with a transform knows of each event, whatever the transform made of it.
TYPE, KEY, VERSION, IS_FILTERED, FAILURE = (
    f"outbox_{word}" for word in ("type", "key", "version", "is_filtered", "failure")
)
PLACE = tuple(PLACE_TYPES)
NAME_MAX_BYTES = 63  # of an identifier of Postgres; a longer one is cut off


class Layout:
    """The columns of a sink's tables, beside event id, partition and offset, and where each event's columns are."""

    def __init__(self, types: Mapping[str, Sequence[Column]]) -> None:
        """``types``: by the name of an event its columns.

        Raises Failure if two events would have one view, or if all events have too many columns for one table.
        """
        self.types = dict(types)
        sql_types: dict[str, set[str]] = defaultdict(set)
        for columns in types.values():
            for column in columns:
                sql_types[column.name].add(column.type)
        self._places = {
            event: {
                column.name: column.name if len(sql_types[column.name]) == 1 else f"{column.name}:{column.type}"
                for column in columns
            }
            for event, columns in types.items()
        }
        self.columns = self._columns()
        self.views = {view_name(event): event for event in types}
        too_long = [view for view in self.views if len(view) > NAME_MAX_BYTES]
        if len(self.views) < len(types) or too_long:
            raise Failure(
                f"the views of the events {', '.join(types)} need different names of at most {NAME_MAX_BYTES} bytes",
                "rename an event, or let another sink take it",
                code="sink-unusable",
            )
        if len(self.columns) > COLUMNS_MAX:
            raise Failure(
                f"the events {', '.join(types)} have {len(self.columns)} columns together, and a table of the sink has "
                f"at most {COLUMNS_MAX}",
                "let several sinks take them, or nest some of their properties",
                code="sink-unusable",
            )

    @classmethod
    def of_decoders(cls, decoders: Mapping[str, RecordDecoder]) -> Layout:
        """How the events of these decoders, by topic, lie together."""
        return cls({name: columns for topic in sorted(decoders) for name, columns in decoders[topic].types.items()})

    @property
    def has_types(self) -> bool:
        """Whether rows say which event they are: there are several."""
        return len(self.types) > 1

    def place(self, event: str, column: str) -> str:
        """The column of the tables in which an event has one of its columns."""
        return self._places[event][column]

    def view(self, event: str) -> sql.Composed:
        """The definition of an event's view: its own columns under their own names."""
        names = {name: name for name in PLACE} | {place: name for name, place in self._places[event].items()}
        return _view(names, EVENT_TYPE if self.has_types else None, event)

    def rows(self, event: str, columns: Columns) -> Columns:
        """Rows of an event with the columns of the tables."""
        places = self._places[event]
        renamed = {places.get(name, name): values for name, values in columns.items()}
        return {**renamed, EVENT_TYPE: [event] * len(columns["offset"])} if self.has_types else renamed

    @property
    def schema(self) -> pa.Schema:
        """The columns of the tables as Arrow has them."""
        return schema_of(types_of(self.columns))

    def table(self, rows: Rows) -> pa.Table:
        """All rows as one table of Arrow; NULL where an event lacks a column."""
        schema, types = self.schema, types_of(self.columns)
        tables = [as_table(self.rows(event, columns), types) for event, columns in rows.items()]
        return pa.concat_tables([schema.empty_table(), *tables], promote_options="default").select(schema.names)

    def _columns(self) -> tuple[Column, ...]:
        found: dict[str, list[Column]] = defaultdict(list)
        for event, columns in self.types.items():
            for column in columns:
                found[self._places[event][column.name]].append(column)
        return (
            *((Column(EVENT_TYPE, "text", is_nullable=False),) if self.has_types else ()),
            *(
                Column(name, of[0].type, len(of) < len(self.types) or any(one.is_nullable for one in of))
                for name, of in found.items()
            ),
        )


class TransformedLayout:
    """The columns of ``batch`` and ``new_events`` in a sink whose events pass a transform: what the sink knows of each
    event, and the columns that the transform returns.

    An event's view has the returned columns, but for those that belong to other events only.
    """

    def __init__(self, events: Layout, returned: Sequence[Column]) -> None:
        """``events`` is how they lie before the transform. Raises Failure if no row has room for what it returns."""
        if row_bytes(returned) > ROW_MAX_BYTES:
            raise Failure(
                f"the transform returns columns that need {row_bytes(returned)} bytes of a row",
                f"{LIMIT}; let it return fewer",
                code="sink-unusable",
            )
        self._events = events
        self.returned = tuple(column._replace(is_nullable=True) for column in returned)  # of a filtered event
        self.columns = (
            Column(TYPE, "text", is_nullable=False),
            Column(KEY, "text", is_nullable=True),
            Column(VERSION, "bigint", is_nullable=True),
            Column(IS_FILTERED, "boolean", is_nullable=False),
            Column(FAILURE, "text", is_nullable=True),
            *self.returned,
        )

    def view(self, event: str) -> sql.Composed:
        """See `Layout.view`."""
        own = {self._events.place(event, column.name): column.name for column in self._events.types[event]}
        others = {column.name for column in self._events.columns} - own.keys()
        names = {name: name for name in PLACE}
        names |= {one.name: own.get(one.name, one.name) for one in self.returned if one.name not in others}
        return _view(names, TYPE if self._events.has_types else None, event)


def view_name(event: str) -> str:
    """The name of an event's view."""
    return f"new_{re.sub(r'[^0-9a-z_]', '_', event.lower())}"


def _view(names: Mapping[str, str], event_type: str | None, event: str) -> sql.Composed:
    """``names``: by column of ``new_events`` its name in the view. ``event_type`` is the column with the event's name,
    if there are several events.
    """
    columns = [sql.SQL("{} AS {}").format(sql.Identifier(place), sql.Identifier(name)) for place, name in names.items()]
    query = sql.SQL("SELECT {} FROM pg_temp.new_events").format(sql.SQL(", ").join(columns))
    if event_type is None:
        return query
    # Of `=` Postgres expects one row in 200, as there are no statistics, and would sort what it could hash. Of a
    # function it expects one in three.
    return query + sql.SQL(" WHERE texteq({}, {})").format(sql.Identifier(event_type), sql.Literal(event))
