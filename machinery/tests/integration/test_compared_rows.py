"""Comparisons of rows on a real Postgres: what is equal, what differs, and what nobody can say at the moment; and
queries of comparisons that fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outbox.audit import rows
from outbox.audit.declared import Declared
from outbox.audit.report import ComparisonReport, Report
from outbox.audit.source import LATE_MS, snapshot
from outbox.audit.store import Store
from outbox.audit.verified import Verified
from outbox.base.database import query
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.events.schema import HIDDEN
from outbox.sink import comparison_files
from outbox.sink.comparison_files import Comparison
from outbox.sink.rows import KEPT, VALUE_MAX_CHARACTERS, Difference, read
from outbox.sink.spec import SinkSpec
from outbox_lab.testing.failures import raises
from tests.support.audit_chain import (
    NOW_MS,
    SINK,
    STOCK_TOPIC,
    Chain,
    Made,
    codes,
    declare,
    invalid,
    letter,
    only_comparison,
    only_sink,
)
from tests.support.made_events import STRATEGIES
from tests.support.sink_driver import spec_with

TABLES: dict[Role, str] = {
    SourceRole.OWNER: "CREATE TABLE bookings (id text, status text, at timestamptz, note text, version bigint);"
    "GRANT SELECT ON bookings TO stock_source_auditor",
    SinkRole.OWNER: "CREATE TABLE booking_states (sink text, booking text, status text, at timestamptz, note text,"
    "                             version bigint, updated_at timestamptz DEFAULT now());"
    "GRANT SELECT ON booking_states TO stock_sink_auditor;",
}
SOURCE = "SELECT id AS key, status, at, note, version FROM bookings"
FILE = f"-- table: booking_states (booking)\n--\n-- [source]\n{SOURCE};\n"
SINK_QUERY = "SELECT sink, booking AS key, status, at, note, version FROM booking_states"
LONG_AGO_MS = NOW_MS - 2 * LATE_MS


@pytest.fixture(scope="module")
def tables(shared_databases: Settings) -> Settings:
    for role, statement in TABLES.items():
        query(shared_databases, role, statement)
    return shared_databases


class World(Chain):
    """A chain in memory whose rows are in two real databases."""

    def __init__(self, declared: Declared, settings: Settings) -> None:
        super().__init__(declared)
        self.settings = settings

    def load(self, store: Store) -> None:
        for role, table, read_side in (
            (SinkRole.AUDITOR, rows.SINK, rows.read_sinks),
            (SourceRole.AUDITOR, rows.SOURCE, rows.read_source),
        ):
            with snapshot(self.settings, role) as connection:
                read = [(one, read_side(connection, one)) for one in self.declared.all_comparisons]
                rows.load_rows(store, table, read)

    def in_source(self, sql: str) -> None:
        query(self.settings, SourceRole.OWNER, sql)

    def in_sink(self, sql: str) -> None:
        query(self.settings, SinkRole.OWNER, sql)

    def booking(self, key: str, changes: int = 1) -> list[Made]:
        """A booking with so many events, which the sink has applied."""
        events = self.written(key, *("1" for _ in range(changes)), at_ms=LONG_AGO_MS)
        self.publish(*events)
        row = f"'{key}', 'booked', '2026-07-01 12:00+02', '', {changes}"
        self.in_source(f"INSERT INTO bookings VALUES ({row})")
        self.in_sink(f"INSERT INTO booking_states VALUES ('{SINK}', {row})")
        return events

    def compare(self, since: Verified | None = None, **sink: Any) -> Report:
        """The report of `outbox check`, incremental or of everything; ``sink`` is the rest of the sink's state."""
        self.applied({}, **sink)
        return super().compare(since)


def require(report: Report, *differing: str, uncertain: str = "") -> ComparisonReport:
    """The keys that differ and those that are uncertain are these, and nothing else is wrong but dead letters."""
    found = only_comparison(report)
    assert [one.key for one in found.differences.worst] == sorted(differing)
    assert found.uncertain == set(uncertain)
    assert set(codes(report)) - {"sink-parked", "malformed-records"} == ({"rows-differ"} if differing else set())
    return found


def described(settings: Settings, folder: Path, text: str = FILE) -> Comparison:
    """The comparison of a file with this text."""
    (folder / "comparisons").mkdir()
    (folder / "comparisons" / "bookings.sql").write_text(text)
    [found] = comparison_files.load(spec_with(STRATEGIES["dedup"], folder / "projections"))
    with snapshot(settings, SourceRole.AUDITOR) as connection:
        return rows.describe(connection, found)


@pytest.fixture
def world(tables: Settings, tmp_path: Path) -> World:
    query(tables, SourceRole.OWNER, "TRUNCATE bookings")
    query(tables, SinkRole.OWNER, "TRUNCATE booking_states")
    return World(declare(tmp_path, comparisons=[described(tables, tmp_path)]), tables)


# What differs -------------------------------------------------------------------------------------------------------


def test_equal_rows_are_equal_whatever_versions_other_columns_and_sinks_have(world: World) -> None:
    world.booking("a")
    world.booking("b", 2)
    world.in_sink("INSERT INTO booking_states VALUES ('other', 'a', 'wrong'), ('other', 'c', 'wrong')")
    world.in_sink(f"UPDATE booking_states SET version = 1 WHERE sink = '{SINK}'")
    found = require(world.compare())
    assert (found.keys, found.not_compared) == (2, "")


def test_a_row_of_an_erased_key_may_differ(world: World) -> None:
    for key in ("a", "b"):
        world.booking(key)
    world.in_sink("DELETE FROM booking_states")
    require(world.compare(), "a", "b")
    world.erase("a")
    require(world.compare(), "b", uncertain="a")


def test_values_of_a_sink_of_personal_data_are_not_shown(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.booking("a")
    world.in_sink("UPDATE booking_states SET status = 'cancelled', note = 'a neighbour'")
    monkeypatch.setattr(SinkSpec, "is_personal", True)
    found = require(world.compare(), "a")
    assert found.differences.worst[0].columns == {"status": (HIDDEN, HIDDEN), "note": (HIDDEN, HIDDEN)}


def test_a_wrong_state_is_named_with_key_column_and_both_values(world: World) -> None:
    for key in "abcd":
        world.booking(key)
    world.in_sink("UPDATE booking_states SET status = 'cancelled' WHERE booking = 'a'")
    world.in_sink("UPDATE booking_states SET note = NULL, at = at + interval '1 microsecond' WHERE booking = 'b'")
    world.in_sink("UPDATE booking_states SET booking = 'z' WHERE booking = 'c'")
    report = world.compare()
    found = {one.key: (one.row, one.columns) for one in only_comparison(report).differences.worst}
    at = "2026-07-01T10:00:00+00:00"
    assert found == {
        "a": ("differs", {"status": ("booked", "cancelled")}),
        "b": ("differs", {"at": (at, at.replace("00+", "00.000001+")), "note": ("", None)}),
        "c": ("missing", {"status": ("booked", None), "at": (at, None), "note": ("", None)}),
        "z": ("surplus", {"status": (None, "booked"), "at": (None, at), "note": (None, "")}),
    }
    [finding] = report.findings
    assert (finding.code, finding.count, finding.sink) == ("rows-differ", 4, SINK)
    assert all(value not in str(finding) for value in ("booked", "cancelled")), "values are in the report alone"
    assert all(f"{name}: " in report.as_text() for name in ("status", "at", "note"))


def test_the_worst_are_kept_and_all_are_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "PASS_ROWS", 17)
    keys = [f"{number:03}" for number in range(3 * KEPT)]
    for key in keys:
        world.booking(key)
    world.in_sink(
        "UPDATE booking_states SET status = repeat('x', 1000), note = CASE booking WHEN '031' THEN 'y' ELSE '' END"
    )
    report = world.compare()
    found = only_comparison(report).differences
    assert found.count == len(keys)
    assert [one.key for one in found.worst] == ["031", *keys[: KEPT - 1]]
    [as_json] = json.loads(report.as_json())["sinks"][0]["comparisons"]
    assert (as_json["keys"], as_json["differing_keys"], as_json["drift"]) == (len(keys), len(keys), {})
    shown = as_json["differences"][0]["columns"]["status"]
    assert shown == {"source": "booked", "sink": '"' + (VALUE_MAX_CHARACTERS - 1) * "x" + "…"}
    assert f"and {len(keys) - 5} more keys" in report.as_text()


# What nobody can say -------------------------------------------------------------------------------------------------


def wrong_everywhere(world: World) -> None:
    world.in_sink("UPDATE booking_states SET status = 'wrong'")


def test_keys_in_flight_are_uncertain_and_the_others_are_compared(world: World) -> None:
    world.booking("a")
    world.booking("b")
    require(world.compare(positions={0: 1}), uncertain="b")
    wrong_everywhere(world)
    require(world.compare(positions={0: 1}), "a", uncertain="b")
    world.outbox.append(world.event("a", 2))
    require(world.compare(), "b", uncertain="a")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_dead_letter_explains_a_difference_of_its_key(world: World, is_open: bool) -> None:
    [event], _ = world.booking("a"), world.booking("b")
    letters = letter(event, is_open=is_open)
    require(world.compare(letters=letters))
    wrong_everywhere(world)
    require(world.compare(letters=letters), "b", uncertain="a")


def test_an_unreadable_record_and_a_lost_event_explain_differences_of_their_keys(world: World) -> None:
    world.booking("b")
    [event], lost = world.written("a", "1"), world.written("c", "1", "1")
    world.in_source("INSERT INTO bookings VALUES ('a', 'booked'), ('c', 'booked')")
    place = world.record(event.event_id, "a", b"{")
    world.publish(lost[1])
    wrong_everywhere(world)
    report = world.compare(letters=invalid(event, place))
    assert codes(report) == ["malformed-records", "events-lost", "rows-differ", "sink-parked"]
    found = only_comparison(report)
    assert ([one.key for one in found.differences.worst], found.uncertain) == (["b"], {"a", "c"})


def test_rows_of_other_keys_are_compared_when_nothing_is_in_flight(world: World) -> None:
    """An event of any key may change any of them."""
    world.booking("a")
    for role, column, table in ((SourceRole.OWNER, "id", "bookings"), (SinkRole.OWNER, "booking", "booking_states")):
        query(world.settings, role, f"UPDATE {table} SET {column} = 'room 1'")
    wrong_everywhere(world)
    report = world.compare(positions={0: 0})
    assert (codes(report), only_comparison(report).not_compared[:7]) == ([], "not now")
    require(world.compare(), "room 1")


def test_a_sink_of_states_is_compared_where_it_has_the_sources_version(world: World) -> None:
    for key in "abc":
        world.booking(key, 2)
    world.in_sink("UPDATE booking_states SET status = 'wrong', version = CASE booking WHEN 'a' THEN 1 ELSE 2 END")
    world.in_sink("DELETE FROM booking_states WHERE booking = 'c'")
    report = world.compare(carries="states")
    require(report, "b")
    assert only_sink(report).in_flight == 1 + 3


# The incremental form ------------------------------------------------------------------------------------------------


def test_an_incremental_check_finds_what_a_full_one_finds(world: World) -> None:
    for key in "abc":
        world.booking(key)
    since = world.compare(Verified("test")).verified
    assert since is not None
    assert since.topic(STOCK_TOPIC).next_offsets[0] == 3
    require(world.compare(since))
    for change in ("SET note = NULL WHERE booking = 'a'", "SET status = 'wrong' WHERE booking IN ('a', 'b')"):
        world.in_sink(f"UPDATE booking_states {change}")
    world.more("b")
    for report in (world.compare(since), world.compare()):
        require(report, "a", uncertain="b")


# Files ---------------------------------------------------------------------------------------------------------------

OF_TABLE = "-- table: booking_states (booking)\n-- [source]\nSELECT {} FROM bookings"
OF_TOTALS = "-- [source]\nSELECT key, total FROM source_totals\n-- [sink]\n{}"


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        (f"-- table: booking_states\n-- [source]\n{SOURCE}", "cannot be read", ""),
        (OF_TABLE.format("id AS key, 1 AS total"), "total", ""),
        (OF_TABLE.format("id AS key"), "columns to compare", ""),
        (OF_TABLE.format("status"), "return key", ""),
        (OF_TABLE.format("nothing"), "does not exist", ""),
        (f"-- [source]\n{SOURCE}\n-- [sink]\n{SINK_QUERY.replace('note, ', '')}", "different columns: note", ""),
        (f"-- table: booking_states (nothing)\n-- [source]\n{SOURCE}", "nothing", ""),
        (OF_TOTALS.format("SELECT key, total FROM nothing"), "does not exist", "`outbox migrate`"),
        (OF_TOTALS.format("SELECT 1 AS key"), "[sink] has no column sink, total", "let it return key, sink, total"),
        (OF_TOTALS.format("SELECT 'x' AS sink, 1 AS key, 1 AS total FROM"), "syntax error", "correct the query"),
        (OF_TOTALS.format("SELECT 'x' AS sink, 1 AS key, 1 / (random() * 0)::int AS total"), "division by zero", ""),
        (OF_TOTALS.format("SELECT sink, 1 AS key, 1 AS total FROM processed_events"), "permission", "GRANT SELECT to"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    tables: Settings, tmp_path: Path, text: str, problem: str, remedy: str
) -> None:
    with (
        raises("comparison-unusable", "bookings.sql", problem, remedy),
        snapshot(tables, SinkRole.AUDITOR) as connection,
    ):
        list(rows.read_sinks(connection, described(tables, tmp_path, text)))


def test_several_rows_of_a_key_that_differ_are_refused(world: World) -> None:
    world.booking("a")
    world.in_sink(f"INSERT INTO booking_states VALUES ('{SINK}', 'a', 'wrong')")
    with raises("comparison-unusable", "several rows of key a", "jsonb_agg"):
        world.compare()


# Values ------------------------------------------------------------------------------------------------------------


def test_rows_of_a_key_are_added_up_exactly(tables: Settings) -> None:
    statement = "SELECT 'a' AS key, total, version FROM (VALUES (1e30, 1), (0.1, 3), (NULL, 2)) AS one (total, version)"
    with snapshot(tables, SinkRole.AUDITOR) as connection:
        found = list(rows.read_source(connection, Comparison(Path("totals.sql"), (), statement)))
    assert found == [("", "a", 3, "1000000000000000000000000000000.1")]


VALUES: list[tuple[str, str, bool]] = [
    ("1.50::numeric", "1.5::numeric", True),
    ("0.1::float8", "0.1::numeric", True),
    ("1e20::float8", "100000000000000000000::numeric", True),
    ("0.1::float8 + 0.2::float8", "0.3::float8", False),
    ("'NaN'::float8", "'NaN'::numeric", True),
    ("NULL::text", "''", False),
    ("true", "1", False),
    ("'a'", "'A'", False),
    ("'a'::char(3)", "'a'::text", False),
    ("'00000000-0000-0000-0000-00000000000A'::uuid", "'00000000-0000-0000-0000-00000000000a'", True),
    ("'2026-07-01 12:00+02'::timestamptz", "'2026-07-01 05:00-05'::timestamptz", True),
    ("'2026-07-01 12:00+00'::timestamptz", "'2026-07-01 12:00'::timestamp", False),
    ("'2026-07-01 12:00'::timestamp", "'2026-07-01 12:00:00.000001'::timestamp", False),
    ("'1 day'::interval", "'24:00'::interval", False),
    ("""'{"b": 1, "a": 2}'::jsonb""", """'{"a": 2, "b": 1}'::json""", True),
    ("""'{"a": 1.0}'::jsonb""", """'{"a": 1.00}'::jsonb""", True),
    (r"""'{"a \" 1.0": "1.0", "b": 2.50}'::jsonb""", r"""'{"a \" 1.0": "1.0", "b": 2.5}'::jsonb""", True),
    (r"""'{"a \" 1.0": 1}'::jsonb""", r"""'{"a \" 1.00": 1}'::jsonb""", False),
    ("'null'::jsonb", "NULL::jsonb", True),
    ("ARRAY[1.0, 2]", "ARRAY[1, 2.00]", True),
    ("'\\x0a'::bytea", "'\\012'::bytea", True),
]


def text_of(settings: Settings, role: SourceRole | SinkRole, expression: str) -> str:
    with snapshot(settings, role) as connection:
        statement = f"SELECT 'sink' AS sink, 1 AS key, {expression} AS value"
        [(_, _, _, text)] = read(connection, statement, ["sink", "key", "value"], by_sink=True)
    return str(text)


def test_values_are_equal_as_the_page_says_whatever_the_settings_of_a_database(databases: Settings) -> None:
    for setting in (
        "extra_float_digits = -10",
        "TimeZone = 'Asia/Tokyo'",
        "bytea_output = 'escape'",
        "DateStyle = 'German'",
    ):
        query(databases, SourceRole.OWNER, f"ALTER DATABASE {databases.source_db_url.name} SET {setting}")
    for source, sink, is_equal in VALUES:
        mine, others = text_of(databases, SourceRole.AUDITOR, source), text_of(databases, SinkRole.AUDITOR, sink)
        assert (mine == others, not Difference.of("a", mine, others).columns) == (is_equal, is_equal), source
    assert "0.30000000000000004" in text_of(databases, SourceRole.AUDITOR, "0.1::float8 + 0.2::float8")
