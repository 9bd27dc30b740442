"""The declarations of a project, as a check needs them: topics, the kinds of events on them, sinks and comparisons.

A *kind* is one version of one event. Events are decoded as sinks that ask for the event get them: older versions become
the newest by upcasters. A version that no upcaster takes stays as it is. Kinds and topics have numbers, because every
row of a check has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Context, Decimal, InvalidOperation
from functools import cached_property
from typing import NamedTuple

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Catalog, Wanted
from outbox.events.schema import EventSchema, Rejection
from outbox.events.upcasting import Upcaster
from outbox.events.values import decode
from outbox.sink import comparison_files, discovery
from outbox.sink.comparison_files import NUMBERS, Comparison
from outbox.sink.decoding.decoder import EventDecoder
from outbox.sink.remembering import positions
from outbox.sink.spec import SinkSpec

# The default context rounds to 28 digits.
EXACT = Context(prec=1000)
DIGITS_MAX = 200  # of a number; the contract refuses longer ones


class Addend(NamedTuple):
    """The number that events of one kind add to a total: a fixed one, or that of a property; unknown if not
    ``is_known``.
    """

    sign: int
    place: int | None = None
    is_known: bool = True

    def of(self, numbers: Sequence[Decimal | None]) -> Decimal | None:
        """The number that an event with these numbers adds; None if nobody knows."""
        if self.place is None:
            return Decimal(self.sign)
        number = numbers[self.place] if self.is_known else None
        return number if number is None or self.sign > 0 else EXACT.minus(number)


@dataclass(frozen=True)
class Kind:
    """One version of an event. Its rows have the columns of ``form``."""

    topic: str
    schema: EventSchema
    form: EventSchema
    upcaster: Upcaster | None = None

    @property
    def event(self) -> str:
        """The name of the event, such as ``order.placed``."""
        return self.schema.event

    @property
    def row(self) -> tuple[str, str, int]:
        """Aggregate type, event type and schema version of its rows in the outbox."""
        return self.schema.aggregate, self.schema.type, self.schema.version


@dataclass(frozen=True)
class EventTopic:
    """A topic of events. ``decoder`` calls the kinds by the names in ``kinds``, which has their numbers."""

    number: int
    name: str
    aggregates: Sequence[Aggregate]
    decoder: EventDecoder
    kinds: Mapping[str, int]
    properties: Sequence[str]
    """The properties of which each event has a number, in this order; 0 if it lacks the property."""

    @property
    def sources(self) -> list[str]:
        """The views of the source database that say the version of every key; none if one of them is not declared."""
        views = [aggregate.source for aggregate in self.aggregates]
        return [] if None in views or self.decoder.version is None else sorted({str(view) for view in views})


@dataclass(frozen=True)
class Declared:
    """All that is declared."""

    topics: Sequence[EventTopic]
    kinds: Sequence[Kind]
    sinks: Mapping[str, SinkSpec]
    comparisons: Mapping[str, Sequence[Comparison]]
    """By sink."""

    @cached_property
    def all_comparisons(self) -> list[Comparison]:
        """Each comparison once; sinks may share them."""
        return list({one.id: one for of_sink in self.comparisons.values() for one in of_sink}.values())

    @cached_property
    def topic_by_name(self) -> Mapping[str, EventTopic]:
        """The topics by their names."""
        return {topic.name: topic for topic in self.topics}

    @cached_property
    def numbers(self) -> list[Numbers]:
        """By kind, what finds the numbers of its events."""
        return [Numbers(self.topic_by_name[kind.topic], kind) for kind in self.kinds]

    def sink(self, name: str) -> SinkSpec | None:
        """The declaration of a sink, or of the sink that it is a copy of; None if it has none any more."""
        return self.sinks.get(name.removesuffix(positions.COPY_SUFFIX))

    def comparisons_of(self, name: str) -> Sequence[Comparison]:
        """The comparisons of a sink, or of the sink that it is a copy of."""
        return self.comparisons.get(name.removesuffix(positions.COPY_SUFFIX), ())

    def addends(self, spec: SinkSpec, comparison: Comparison) -> list[Addend | None]:
        """By kind, what an event adds to the totals of a comparison; None if it adds nothing."""
        found: list[Addend | None] = []
        for kind in self.kinds:
            name = name_in(spec, kind)
            adds = None if name is None else comparison.adds_of(kind.schema)
            if adds is None or adds.property is None:
                found.append(None if adds is None else Addend(adds.sign))
                continue
            # A sink that has asked for an old version alone has other columns than the check.
            is_known = name == kind.event or kind.upcaster is None
            place = self.topic_by_name[kind.topic].properties.index(adds.property)
            found.append(Addend(adds.sign, place, is_known=is_known))
        return found


class Numbers:
    """Finds the numbers of events of one kind, in the order of their topic's properties."""

    def __init__(self, topic: EventTopic, kind: Kind) -> None:
        self._names, self._upcaster = topic.properties, kind.upcaster
        columns = {column.name: column for column in kind.form.columns if column.type in NUMBERS}
        self._columns = [columns.get(name) for name in topic.properties]

    def of(self, texts: Sequence[str | None], payload: str | None = None) -> tuple[Decimal | None, ...]:
        """The numbers of an event with these properties; 0 where it has none, None where it has no valid one.

        ``payload`` is that of an older version, which has to be upcast.
        """
        if payload is not None and self._upcaster is not None and any(self._columns):
            upcast = self._upcaster.upcast(decode(payload))
            if isinstance(upcast, Rejection):
                return (None,) * len(self._columns)
            texts = [None if upcast.get(name) is None else str(upcast[name]) for name in self._names]
        return tuple(
            Decimal(0) if column is None or (column.is_nullable and text is None) else number_of(text)
            for column, text in zip(self._columns, texts, strict=True)
        )


def name_in(spec: SinkSpec, kind: Kind) -> str | None:
    """The name by which a sink has asked for a kind; None if it has not."""
    decoder = spec.decoders.get(kind.topic)
    names = (kind.schema.event, kind.schema.name)
    return next((name for name in names if decoder is not None and name in decoder.types), None)


def load(settings: Settings) -> Declared:
    """The declarations of this project.

    Raises Failure if it declares no event, or if a comparison cannot be used.
    """
    known = catalog.of_project(settings)
    if not known.aggregates:
        raise Failure(
            f"{known.folder} declares no event: nothing can be compared",
            "declare one (docs/events.md)",
            code="event-undeclared",
        )
    sinks = discovery.sinks(settings)
    comparisons = {name: comparison_files.load(one) for name, one in sinks.items()}
    return of_catalog(known, sinks, comparisons, settings.sink_id_age_max_days)


def of_catalog(
    known: Catalog,
    sinks: Mapping[str, SinkSpec],
    comparisons: Mapping[str, Sequence[Comparison]],
    age_max_days: int = 3660,
) -> Declared:
    """The declarations of a catalog, of sinks and of their comparisons."""
    kinds: list[Kind] = []
    topics: list[EventTopic] = []
    for number, (name, aggregates) in enumerate(known.topics.items()):
        first = len(kinds)
        kinds += [kind for aggregate in aggregates for kind in _kinds(known, aggregate)]
        mine = kinds[first:]
        topics.append(
            EventTopic(
                number=number,
                name=name,
                aggregates=aggregates,
                decoder=EventDecoder(aggregates, list(map(_wanted, mine)), age_max_days),
                kinds={_name(kind): place for place, kind in enumerate(mine, first)},
                properties=sorted(set(_properties(mine, sinks, comparisons))),
            )
        )
    ids = sorted({one.id for of_sink in comparisons.values() for one in of_sink})
    numbered = {
        sink: [replace(one, number=ids.index(one.id)) for one in of_sink] for sink, of_sink in comparisons.items()
    }
    return Declared(topics, kinds, sinks, numbered)


def _kinds(known: Catalog, aggregate: Aggregate) -> Iterator[Kind]:
    for type_, versions in aggregate.events.items():
        try:
            [newest] = known.wanted([f"{aggregate.name}.{type_}"])
        except Failure as failure:
            if failure.code != "upcaster-missing":
                raise
            yield from (Kind(aggregate.topic, schema, schema) for schema in versions.values())
        else:
            for schema, upcaster in newest.accepts.values():
                yield Kind(aggregate.topic, schema, newest.schema, upcaster)


def _name(kind: Kind) -> str:
    """Not the name of an event, nor of a version: the decoder skips what was not asked for by one of those."""
    return f"{kind.event} {kind.schema.version}"


def _wanted(kind: Kind) -> Wanted:
    # As for a sink that asks for the aggregate: what nobody has declared is not skipped, but no event.
    accepts = {kind.schema.version: (kind.schema, kind.upcaster)}
    return Wanted(_name(kind), kind.form, accepts, by_aggregate=True)


def _properties(
    kinds: Iterable[Kind], sinks: Mapping[str, SinkSpec], comparisons: Mapping[str, Sequence[Comparison]]
) -> Iterator[str]:
    for kind in kinds:
        for name, of_sink in comparisons.items():
            for adds in (one.adds_of(kind.schema) for one in of_sink):
                if adds is not None and adds.property is not None and name_in(sinks[name], kind) is not None:
                    yield adds.property


def text_of(value: Decimal, sign: str = "") -> str:
    """A number in plain digits: no exponent, no zeros at the end."""
    text = f"{value:{sign}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number_of(text: str | None) -> Decimal | None:
    """The number of a property; None if it has none, as in a payload that breaks the contract."""
    try:
        number = None if text is None or len(text) > DIGITS_MAX else EXACT.create_decimal(text)
    except InvalidOperation:
        return None
    return number if number is not None and number.is_finite() else None
