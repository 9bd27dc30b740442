"""The apply against a real Postgres: one batch, one transaction; what strategies remember of ids and versions; and a
binary COPY, which stores the same values as Postgres makes of their text.

The attack delivers to each strategy at random, and compares it with a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from psycopg2 import extensions, sql

from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.sink.applying.postgres import target
from outbox.sink.decoding import binary
from outbox.sink.decoding.values import Type, as_table, columns_of
from outbox.sink.remembering import fence
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests.support.made_events import (
    DAY_MS,
    NOW_MS,
    PROJECTIONS,
    STRATEGIES,
    TOPIC,
    TOPIC_ID,
    Event,
    batch,
    dead_record,
    nth_key,
    sums,
    uuid7,
)
from tests.support.sink_driver import Database, open_sink, projections_in, sink_on

RANDOM = Random(3)  # noqa: S311


def events(count: int, items: int = 3) -> list[Event]:
    """Fresh events, their quantities all different so that no two mistakes cancel."""
    return [
        Event(uuid7(RANDOM), nth_key(number % items), quantity=(-1) ** number * 3**number, version=number + 1)
        for number in range(count)
    ]


def test_two_records_of_one_id_count_as_one_event(databases: Settings, database: Database) -> None:
    one, two = events(2)
    others = [replace(event, quantity=sign * 6, version=9) for event in (one, two) for sign in (1, -1)]
    assert {event.type for event in others} == {"picked", "received"}
    with open_sink(databases) as sink:
        assert sink.apply(batch([one, *others[:2]])) == Counts(3, 1, 2)
        sink.apply(batch([two], start=3))
        assert sink.apply(batch(others, start=4)) == Counts(4, 0, 4)
    assert database.totals() == sums([one, two])


def test_sinks_that_write_the_same_ids_at_once_do_not_deadlock(databases: Settings) -> None:
    """No two sinks share a row. What they share is the partitions of days that none has used before: so two of each
    strategy, one of which goes through the days in the opposite order.
    """
    some = [
        Event(uuid7(RANDOM, NOW_MS - (90 + n // 100) * DAY_MS), nth_key(n), quantity=1, version=1, total_after=1)
        for n in range(2000)
    ]

    def run(strategy: Strategy, mine: list[Event]) -> None:
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink = sink_on(connection, strategy)
            for start in range(0, 2000, 200):
                sink.apply(batch(mine[start : start + 200], start))

    twins = [replace(strategy, name=f"{strategy.name} too") for strategy in STRATEGIES.values()]
    with ThreadPoolExecutor(2 * len(twins)) as pool:
        running = [pool.submit(run, strategy, some) for strategy in STRATEGIES.values()]
        running += [pool.submit(run, twin, some[::-1]) for twin in twins]
    for one in running:
        one.result()
    for name in [*STRATEGIES, *(twin.name for twin in twins)]:
        assert Database(databases, name).totals() == sums(some), name


class TestPositions:
    def test_events_before_the_batch_that_never_came_stop_the_sink(
        self, databases: Settings, database: Database
    ) -> None:
        some = events(4)
        with open_sink(databases) as sink:
            sink.apply(batch(some[:2]))
            with raises("events-lost", f"offsets 2 to 4 of topic {TOPIC}, partition 0"):
                sink.apply(batch(some[2:], start=5))
        assert database.totals() == sums(some[:2])
        assert database.positions() == {0: 2}


class TestFence:
    def test_the_server_is_told_to_notice_a_dead_host(self, databases: Settings) -> None:
        # That it then does is the kernel's promise: a host that goes silent is not made here.
        with closing(connect(databases, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
            sink_on(connection)
            cursor.execute("SELECT setting::int FROM pg_settings WHERE name = 'tcp_user_timeout'")
            assert cursor.fetchall() == [(fence.DEAD_HOST_S * 1000,)]


class TestAllOrNothing:
    def test_a_projection_that_fails_leaves_no_mark(
        self, databases: Settings, database: Database, tmp_path: Path
    ) -> None:
        broken = projections_in(tmp_path, (PROJECTIONS / "stock.sql").read_text() + "\nSELECT 1 / 0;")
        some = events(2)
        with closing(connect(databases, SinkRole.WRITER)) as connection:
            sink = sink_on(connection, projections=broken)
            refused = "refused offsets {0: 0} to {0: 3}"
            with raises("database-refused", refused, f"{broken}/stock.sql: division by zero"):
                sink.apply(batch(some, dead=[dead_record(2)]))
        assert (database.totals(), database.positions(), database.dead_letters()) == ({}, {}, {})
        assert database.processed() == 0
        with open_sink(databases) as corrected:
            assert corrected.apply(batch(some)) == Counts(2, 2)

    def test_positions_that_are_refused_leave_no_mark(self, databases: Settings, database: Database) -> None:
        query(databases, SinkRole.OWNER, "ALTER TABLE positions ADD CHECK (next_offset < 2)")
        with open_sink(databases) as sink, raises("database-refused", "refused offsets"):
            sink.apply(batch(events(2)))
        assert (database.totals(), database.positions(), database.processed()) == ({}, {}, 0)


class TestTemporaryTables:
    """Autovacuum cannot advance the horizon of a session's temporary tables, and they hold the database's back."""

    USE_TRANSACTIONS = "DO $$ BEGIN FOR one IN 1..1000 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$"
    AGE = "SELECT max(age(relfrozenxid)) FROM pg_class WHERE relpersistence = 't' AND relkind IN ('r', 't')"

    def test_a_sink_renews_them_now_and_then(
        self, databases: Settings, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(target, "RENEWAL_S", 0)
        some, ages = events(6), list[int]()
        with open_sink(databases) as sink:
            for start in (0, 3):
                sink.apply(batch(some[start : start + 3], start))
                with closing(connect(databases, SinkRole.WRITER)) as connection:
                    connection.autocommit = True
                    connection.cursor().execute(self.USE_TRANSACTIONS)
                ages.append(int(str(database.query(self.AGE)[0][0])))
        assert ages[0] >= 1000
        assert ages[1] < 2000
        assert database.totals() == sums(some)


# Strategy `versions` -----------------------------------------------------------------------------------------------

NAME = "versions"
LOWEST, HIGHEST = -(2**63), 2**63 - 1
# Neighbours at both bounds and around 0, so that ranges meet.
VERSIONS = [LOWEST, LOWEST + 1, -1, *range(9), HIGHEST - 2, HIGHEST - 1, HIGHEST]
Feed = Callable[..., Counts]


def numbered(version: int, quantity: int = 1, key: str = nth_key(1)) -> Event:
    """An event with an id of its own."""
    return Event(uuid7(RANDOM), key, quantity, version)


def kept_ranges(database: Database, key: str = nth_key(1)) -> int:
    """In how many ranges the sink remembers the versions of a key."""
    found = database.query("SELECT (SELECT count(*) FROM unnest(versions)) FROM applied_versions WHERE key = %s", key)
    return sum(int(str(count)) for (count,) in found)


@pytest.fixture
def versions(databases: Settings) -> Database:
    return Database(databases, NAME)


@pytest.fixture
def feed(databases: Settings) -> Iterator[Feed]:
    """Delivers events to a sink, one batch after the other."""
    with open_sink(databases, NAME) as sink:
        yield lambda *events: sink.apply(batch(events, sink.positions(TOPIC, TOPIC_ID).get(0, 0)))


@hypothesis.settings(
    max_examples=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.lists(st.sampled_from(VERSIONS), max_size=14), min_size=1, max_size=5))
@example([[HIGHEST], [HIGHEST - 1, HIGHEST], [LOWEST]])
@example([[1, 2, 3], [3, 4], [4]])
@example([[1, 3], [2], [1, 2, 3]])
def test_versions_are_applied_once_in_any_order(feed: Feed, versions: Database, batches: list[list[int]]) -> None:
    key, known = nth_key(RANDOM.getrandbits(60)), set[int]()
    events = {version: numbered(version, RANDOM.getrandbits(20) + 1, key) for version in VERSIONS}
    for some in batches:
        new = {*some} - known
        known |= new
        assert feed(*(events[version] for version in some)) == Counts(len(some), len(new), len(some) - len(new))
    assert versions.totals().get(key) == sums(events[version] for version in known).get(key)
    assert kept_ranges(versions, key) == sum(version - 1 not in known for version in known)


def test_thousands_of_gaps_are_filled_in_any_order(feed: Feed, versions: Database) -> None:
    history = [numbered(version) for version in range(1, 10_001)]
    assert feed(*history[::2]) == Counts(5000, 5000)
    assert kept_ranges(versions) == 5000
    late = RANDOM.sample(history[1::2], 5000)
    assert feed(*late[:2500]) == Counts(2500, 2500)
    assert feed(*history, *late[:2500]) == Counts(12_500, 2500, 10_000)
    assert kept_ranges(versions) == 1
    assert versions.totals() == sums(history)


def test_of_two_events_with_one_version_the_second_is_set_aside(feed: Feed, versions: Database) -> None:
    first, second = numbered(1, 5), numbered(1, 6)
    assert feed(first, second, numbered(2, 7), first, second) == Counts(5, 2, 2, 1)
    assert versions.dead_letters() == {second.event_id: "repeated version"}
    ((detail,),) = versions.query("SELECT detail FROM dead_letters")
    assert first.event_id in str(detail)


def test_an_id_that_comes_again_with_another_version_is_another_event(feed: Feed, versions: Database) -> None:
    first = numbered(1, 5)
    again = replace(first, version=2, quantity=6)
    assert feed(first, again, first, again) == Counts(4, 2, 2)
    assert versions.totals() == sums([first, again])


# Binary COPY ---------------------------------------------------------------------------------------------------------

Row = dict[Type, Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
VALUES: dict[Type, st.SearchStrategy[Any]] = {
    "uuid": st.uuids().map(str) | st.uuids().map(lambda one: str(one).upper()),
    "timestamptz": st.datetimes(timezones=st.timezones()),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "boolean": st.booleans(),
    "text": TEXTS,
    "numeric": st.decimals(allow_nan=False, allow_infinity=False).filter(lambda one: abs(one.adjusted()) < 100).map(str)
    | st.integers(-(10**50), 10**50).map(str),
    "jsonb": st.sampled_from(["{}", "null", '"ü"', '{"a": [1.50, true]}']),
    "bytea": st.binary(max_size=5),
    "double precision": st.floats(),
    "date": st.dates(),
}
COLUMNS: dict[str, Type] = {f"{type_}_column": type_ for type_ in VALUES}


@pytest.fixture(scope="module")
def connection(shared_databases: Settings) -> Iterator[extensions.connection]:
    """With a temporary table that has a column of each type."""
    with closing(connect(shared_databases, SinkRole.WRITER)) as connection:
        with connection, connection.cursor() as cursor:
            table = sql.SQL("CREATE TEMPORARY TABLE copied (number int, {})")
            cursor.execute(table.format(binary.definitions(COLUMNS)))
        yield connection


def copied(connection: extensions.connection, rows: Sequence[Row]) -> list[tuple[Any, ...]]:
    """The copied rows, read from Postgres as text."""
    values = [(number, *(row[type_] for type_ in VALUES)) for number, row in enumerate(rows)]
    all_types: Mapping[str, Type] = {"number": "integer", **COLUMNS}
    with connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE copied")
        binary.encode(columns_of(all_types, values), all_types).copy(cursor, sql.Identifier("copied"))
        texts = ", ".join(f'"{column}"::text' for column in COLUMNS)
        cursor.execute(f"SELECT {texts} FROM copied ORDER BY number")
        return cursor.fetchall()


def as_text(connection: extensions.connection, row: Row) -> tuple[Any, ...]:
    """The values of a row as Postgres' text."""
    with connection, connection.cursor() as cursor:
        cursor.execute(
            f"SELECT {', '.join(f'CAST(CAST(%s AS {type_}) AS text)' for type_ in VALUES)}",
            # A literal of a number has no -0.0.
            [repr(value) if isinstance(value, float) else value for value in map(row.get, VALUES)],
        )
        ((*found,),) = cursor.fetchall()
        return tuple(found)


def row(numeric: str) -> Row:
    return {**dict.fromkeys(VALUES), "numeric": numeric}


ROWS = st.fixed_dictionaries({type_: st.none() | values for type_, values in VALUES.items()})


@hypothesis.settings(deadline=None, max_examples=50)
@given(rows=st.lists(ROWS, min_size=1, max_size=5))
@example([row(text) for text in ("0", "-0.00", "1E+5", "10000", "0.0001", "1E-9", "-12345.6789", "9999.99990000")])
@example([row(text) for text in ("1E+5000", "-12.5e-9999", "0E+9999", "-0E-9999", "1e3", "-.5E1", "7.E-4")])
@example([{**row("1"), "text": text} for text in ("üa", "abc", "a\\N")])  # of one width in bytes
@example([{**row("1"), "text": text} for text in ("ü" * 60, "a" * 120)])
def test_values_arrive_as_they_would_as_text_and_alike_from_a_table_of_arrow(
    connection: extensions.connection, rows: Sequence[Row]
) -> None:
    assert copied(connection, rows) == [as_text(connection, one) for one in rows]
    columns = {name: [row[type_] for row in rows] for name, type_ in COLUMNS.items()}
    with suppress(pa.ArrowException):  # a moment of the first or last day of the calendar elsewhere
        assert binary.encode_table(as_table(columns, COLUMNS), COLUMNS) == binary.encode(columns, COLUMNS)


@hypothesis.settings(deadline=None, max_examples=50)
@given(
    scale=st.integers(0, 9),
    digits=st.lists(st.none() | st.integers(-(10**20), 10**20) | st.integers(-(10**6), 10**6), min_size=1, max_size=5),
)
@example(0, [0, None, 9_999, -10_000, 2**63 - 1, -(2**63)])
@example(3, [-1, 0, 1_000, -12_345_678])
def test_decimals_of_arrow_arrive_as_they_are(
    connection: extensions.connection, scale: int, digits: Sequence[int | None]
) -> None:
    """Those of 64 bits go another way than others."""
    numbers = [None if digit is None else Decimal(digit).scaleb(-scale) for digit in digits]
    columns = {
        "number": pa.array(range(len(numbers)), pa.int32()),
        "numeric_column": pa.array(numbers, pa.decimal128(38, scale)),
    }
    for some in (pa.table(columns), pa.table(columns).slice(1)):
        with connection, connection.cursor() as cursor:
            cursor.execute("TRUNCATE copied")
            binary.encode_table(some, {"number": "integer", **COLUMNS}).copy(cursor, sql.Identifier("copied"))
            cursor.execute("SELECT numeric_column::text FROM copied ORDER BY number")
            found = [text for (text,) in cursor]
        assert found == [None if number is None else f"{number:f}" for number in some["numeric_column"].to_pylist()]


@pytest.mark.parametrize("parts", [[[]], [[], [1], [], [2, 3]]], ids=["alone", "among others"])
def test_no_rows_end_no_copy(connection: extensions.connection, parts: list[list[int]]) -> None:
    types: Mapping[str, Type] = {"number": "integer"}
    [together] = binary.Encoded.together(binary.encode({"number": numbers}, types) for numbers in parts)
    with connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE copied")
        together.copy(cursor, sql.Identifier("copied"))
        cursor.execute("SELECT count(*) FROM copied")
        assert cursor.fetchone() == (sum(map(len, parts)),)
