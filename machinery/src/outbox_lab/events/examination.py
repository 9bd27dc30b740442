"""Examine whether a project's sinks can run on the declared events, for `outbox events check`, without a database.

A sink may be unable to start though each declaration is valid: an upcaster is missing, two events would have one view,
or a projection cannot be used. And an edit that is compatible for each event alone may move a column: a property that
has two types in the events of a sink has a column for each type, as in ``price:numeric``
(`outbox.sink.decoding.layout`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from outbox.base.errors import Failure
from outbox.base.sections import COMMENT
from outbox.base.settings import Settings
from outbox.events.catalog import Catalog, Finding, Wanted
from outbox.sink import discovery
from outbox.sink.applying import projection
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.decoding.layout import Layout, view_name
from outbox.sink.spec import SinkSpec


def examine(settings: Settings, published: Catalog | None = None) -> list[Finding]:
    """Every sink that cannot start, or that looks for a column where it is not.

    With ``published``, also the columns that have moved since then, for a transform or a target that is no projection.
    Raises what a module ``job`` raises.
    """
    usable, failures = discovery.usable(settings)
    return [
        *(_unusable(name, failure) for name, failure in failures.items()),
        *(finding for spec in usable for finding in _unerasable(spec)),
        *(finding for spec in usable for finding in _misplaced(spec)),
        *(finding for spec in usable if published is not None for finding in _moved(spec, published)),
    ]


def _unusable(name: str, failure: Failure) -> Finding:
    return Finding(failure.code, f"sink {name}", "", str(failure).removeprefix(f"sink {name}: "))


def _unerasable(spec: SinkSpec) -> Iterator[Finding]:
    """The topics whose personal data `outbox erase` could not erase."""
    for topic in () if spec.target.is_elsewhere else spec.decoders:
        try:
            spec.erase_files(topic)
        except Failure as failure:
            yield _unusable(spec.name, failure)


def _misplaced(spec: SinkSpec) -> Iterator[Finding]:
    """The properties that a projection reads from ``new_events`` by a name that no column has any more."""
    if not isinstance(spec.target, PostgresTarget) or spec.job.transform is not None:
        return
    split = _split(spec.layout)
    for one in projection.load(spec.job.projections, spec.strategy.takes) if split else ():
        text = COMMENT.sub("", f"{one.refuse}\n{one.apply}")
        words = {*re.findall(r"\w+", text)}
        for name, places in split.items():
            views = {view_name(event) for event in spec.layout.types if (event, name) in places}
            is_named = "new_events" in words and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)
            if is_named and not views & words and not any(f'"{place}"' in text for place in places.values()):
                columns = " and ".join(f'"{place}"' for place in sorted({*places.values()}))
                message = (
                    f"projection {one.name} reads it from new_events, where it is {columns}, because it has two types "
                    f"in the events of the sink: read {columns}, or the views of the events"
                )
                yield Finding("column-split", f"sink {spec.name}", name, message)


def _split(layout: Layout) -> Mapping[str, Mapping[tuple[str, str], str]]:
    """By the name of each property with several types, the column by event and name."""
    found: dict[str, dict[tuple[str, str], str]] = {}
    for event, columns in layout.types.items():
        for column in columns:
            if (place := layout.place(event, column.name)) != column.name:
                found.setdefault(column.name, {})[event, column.name] = place
    return found


def _moved(spec: SinkSpec, published: Catalog) -> Iterator[Finding]:
    """The columns of the events that a transform, or a target outside the sink database, finds under other names."""
    if isinstance(spec.target, PostgresTarget) and spec.job.transform is None:
        return
    before = _layout(spec.job.events, published)
    for event, columns in before.types.items():
        kept = {column.name for column in spec.layout.types.get(event, ())}
        for name in (column.name for column in columns if column.name in kept):
            old, new = before.place(event, name), spec.layout.place(event, name)
            if old != new:
                message = f"of {event} was the column {old}, and would be {new}, because it gets several types"
                yield Finding("column-moved", f"sink {spec.name}", name, message)


def _layout(names: Sequence[str], published: Catalog) -> Layout:
    """How the events that were published lay in the tables of a sink; without any, if it could not take them."""
    types = {one.name: one.schema.columns for name in names for one in _wanted(name, published)}
    try:
        return Layout(types)
    except Failure:
        return Layout({})


def _wanted(name: str, published: Catalog) -> Iterable[Wanted]:
    try:
        return published.wanted([name])
    except Failure:
        return ()
