"""Whether a transform keeps the rules of `outbox.sink.spark.transform`: for a project's own tests, without Kafka.

    def test_the_transform_keeps_the_rules(spark, settings):
        events = example_events(spark, settings, ["item"])
        rows = check_transform(in_grams, events)
        assert rows[0]["grams"] == 3000

`check_transform` finds what depends on other events, on their order, on tasks, on chance and on the moment. It does not
find what changes too slowly for a test, such as the day of `current_date`, or a table that somebody else updates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.schema import EventSchema
from outbox.sink.decoding.layout import PLACE, Layout
from outbox.sink.decoding.records import Record
from outbox.sink.discovery import event_decoders
from outbox.sink.spark.transform import Function, as_events, frame_schema, not_storable
from outbox_lab.testing.sinks import at_places, made_id, made_record

SEED = 23
PARTITIONS = 3  # of the topics that events are said to come from
OTHER_PARTITIONS = 5  # of a DataFrame
ALONE = 3
PLACES_KEPT, ONE_ROW, SAME_ROW = (
    "event_id, partition and offset stay as they are",
    "an event has one row at most",
    "the same event gives the same row",
)

Place = tuple[str, int, int]
Row = dict[str, Any]


def example_events(
    spark: SparkSession,
    settings: Settings,
    names: Sequence[str],
    payloads: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    *,
    count: int = 60,
) -> DataFrame:
    """Made-up events, as a sink would give them to its transform: with the columns and types of
    `outbox.sink.spark.transform.frame_schema`.

    ``names`` are as in a job. ``payloads`` are by the event, as ``order.placed`` or ``order.placed.v1``; without a
    version they are of the newest. Without any, the examples of the schemas are taken, of every version that is read.
    They are repeated, each time as another event, until there are ``count`` events at least. Event ids, partitions and
    offsets are the same each time.

    Raises Failure `event-undeclared` for an unknown name; `event-invalid` if a sink would reject a payload, or if
    there are no payloads.
    """
    decoders = event_decoders(settings, names)
    layout = Layout.of_decoders(decoders)
    given = list(_examples(settings, names) if payloads is None else _declared(settings, payloads))
    if not given:
        raise Failure(f"the schemas of {', '.join(names)} have no examples", "give payloads", code="event-invalid")
    made = {topic: dict[tuple[int, int], Record]() for topic in decoders}
    for number, (schema, payload) in enumerate(islice(cycle(given), max(count, len(given)))):
        aggregate = catalog.of_project(settings).aggregates[schema.aggregate]
        if aggregate.topic not in made:
            raise Failure(f"{schema.name} is not one of {', '.join(names)}", "name it too", code="event-invalid")
        record = made_record(schema, str(payload.get(aggregate.key)), made_id(number), payload)
        made[aggregate.topic][number % PARTITIONS, number // PARTITIONS] = record
    tables = [as_events(layout.table({}), "")]
    for topic, records in made.items():
        decoded = decoders[topic].decode(at_places([*records.values()], [*records]))
        if decoded.dead or decoded.skipped:
            why = decoded.dead[0].rejection.detail if decoded.dead else f"{', '.join(decoded.skipped)} is not asked for"
            raise Failure(f"a sink would refuse a payload: {why}", "correct it", code="event-invalid")
        tables.append(as_events(layout.table(decoded.rows), topic))
    return spark.createDataFrame(pa.concat_tables(tables).combine_chunks(), frame_schema(layout))


class Split(NamedTuple):
    """A way to divide events: some of them, and of how many partitions their DataFrame is; None leaves it to Spark."""

    name: str
    events: pa.Table
    partitions: int | None = None


def check_transform(transform: Function, events: DataFrame, *, seed: int = SEED) -> list[Row]:
    """Apply a transform to events, and again in other splits and orders, and require that the results agree.

    It takes some thousands of events at most: they come to the driver. Returns the rows of all events, in the order of
    event ids. An event that is filtered has none. An error of the transform is raised as it is.

    Raises AssertionError that names the rule that it breaks, the event, the column, and both values; or why no sink can
    take the columns that it returns.
    """
    given = events.toArrow()
    if not given.num_rows:
        raise AssertionError("there are no events to check the transform with")
    name = getattr(transform, "__name__", repr(transform))
    whole = dict[Place, Row]()
    for number, split in enumerate(_splits(given, Random(seed))):  # noqa: S311 - no secret
        some = events.sparkSession.createDataFrame(split.events, events.schema)
        returned = transform(some if split.partitions is None else some.repartition(split.partitions))
        if problem := not_storable(returned.schema, events.schema):
            raise AssertionError(f"no sink can take {name}: {problem[0]}: {problem[1]}")
        rows = returned.toArrow().to_pylist()
        if number == 0:
            whole = {_place(row): row for row in rows}
        if breach := _breach(list(map(_place, split.events.select(PLACE).to_pylist())), rows, whole):
            rule, (event_id, partition, offset), difference = breach
            raise AssertionError(
                f"{name} breaks the rule: {rule}. Event {event_id}, offset {offset} of partition {partition}: "
                f"{difference} ({split.name}; seed {seed})"
            )
    return [whole[place] for place in sorted(whole)]


def _breach(given: Sequence[Place], rows: Sequence[Row], whole: Mapping[Place, Row]) -> tuple[str, Place, str] | None:
    """The first breach of a rule by the rows of some events: the rule, the event, and what is wrong."""
    found = dict[Place, Row]()
    for row in rows:
        place = _place(row)
        if place not in given:
            return PLACES_KEPT, place, "no event is there"
        if place in found:
            return ONE_ROW, place, _difference(found[place], row) or "it has two equal rows"
        found[place] = row
    for place in given:
        among_all, here = whole.get(place), found.get(place)
        if among_all is None or here is None:
            difference = None if among_all is here else f"{_shown(among_all)} among all, {_shown(here)} here"
        else:
            difference = _difference(among_all, here)
        if difference is not None:
            return SAME_ROW, place, difference
    return None


def _splits(given: pa.Table, random: Random) -> Iterator[Split]:
    numbers = list(range(given.num_rows))
    shuffled = random.sample(numbers, len(numbers))
    yield Split("all events", given)
    yield Split("all events again", given)
    yield Split("all events in another order", given.take(shuffled), 1)
    yield Split(f"all events in {OTHER_PARTITIONS} partitions", given, OTHER_PARTITIONS)
    middle = len(numbers) // 2
    parts = {"half": [numbers[:middle], numbers[middle:]], "seventh": [shuffled[first::7] for first in range(7)]}
    for name, of_name in parts.items():
        for number, some in enumerate(of_name, 1):
            if some:
                yield Split(f"{name} {number} of the events", given.take(some))
    for number in shuffled[:ALONE]:
        yield Split("the event alone", given.slice(number, 1))


def _place(row: Mapping[str, Any]) -> Place:
    return row["event_id"], row["partition"], row["offset"]


def _difference(one: Row, other: Row) -> str | None:
    """The first column in which two rows differ, and both values."""
    # By their text, because NaN is not equal to itself.
    column = next((name for name in one if repr(one[name]) != repr(other[name])), None)
    return None if column is None else f"column {column}: {one[column]!r} and {other[column]!r}"


def _shown(row: Row | None) -> str:
    return "no row" if row is None else f"a row {row}"


def _examples(settings: Settings, names: Sequence[str]) -> Iterator[tuple[EventSchema, Mapping[str, Any]]]:
    for wanted in catalog.of_project(settings).wanted(names):
        for schema, _ in wanted.accepts.values():
            for example in schema.examples:
                yield schema, example


def _declared(
    settings: Settings, payloads: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[EventSchema, Mapping[str, Any]]]:
    known = catalog.of_project(settings)
    newest_last = sorted(known.schemas, key=lambda schema: schema.version)
    for name, of_name in payloads.items():
        found = [schema for schema in newest_last if name in (schema.event, schema.name)]
        if not found:
            known.wanted([name])  # raises Failure
            raise Failure(f"{name} is an aggregate type", f"name the event, such as {name}.TYPE", code="event-invalid")
        for payload in of_name:
            yield found[-1], payload
