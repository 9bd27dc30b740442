"""`outbox rebuild --from source` of tables that comparisons of rows declare, on a real Postgres."""

from __future__ import annotations

import shutil
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from random import Random

import pytest

from outbox.audit import rows
from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka.topics import Topic
from outbox.maintenance import erase
from outbox.sink import comparison_files
from outbox.sink.repair import derived, rebuild
from outbox.sink.repair.rebuild import RebuildResult
from outbox.sink.rows import Difference
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts
from outbox_lab.testing.failures import raises
from tests.support.deliveries import SURVIVES_RE_SENDS
from tests.support.made_events import PROJECTIONS, STRATEGIES, TOPIC, TOPIC_ID, Event, batch, nth_key, sums, uuid7
from tests.support.sink_driver import Database, open_sink, spec_with

RANDOM = Random(45)  # noqa: S311
HERE = [Topic(TOPIC, TOPIC_ID, 1)]
WHOLE = {TOPIC: {0: 0}}
# Of the fixture domain: each event is a version.
STOCK = """
-- table: stock (item_id)
--
-- [source]
SELECT key, unit, total AS stock, version, version AS events FROM source_totals;
"""
DELETES = "GRANT DELETE ON stock TO stock_sink_writer"


def execute(settings: Settings, sql: str, role: SinkRole | SourceRole = SinkRole.OWNER) -> None:
    query(settings, role, sql)


def history(number: int, count: int) -> list[Event]:
    """The first events of an item."""
    totals = list(accumulate(3**version for version in range(1, count + 1)))
    return [
        Event(uuid7(RANDOM), nth_key(number), 3**version, version, total_after=total)
        for version, total in enumerate(totals, start=1)
    ]


def book(settings: Settings, *events: Event) -> None:
    """Let the source's items be as after these events."""
    versions = {event.key: event.version for event in events}
    for key, total in sums(events).items():
        execute(
            settings,
            f"INSERT INTO items (id, unit, stock, version) VALUES ('{key}', 'KGM', {total}, {versions[key]})"
            " ON CONFLICT (id) DO UPDATE SET stock = excluded.stock, version = excluded.version",
            SourceRole.OWNER,
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The projections of the fixture domain, without a file that rebuilds them; and a comparison of rows."""
    copied = Path(shutil.copytree(PROJECTIONS, tmp_path / "projections"))
    for file in copied.glob("*.rebuild.sql"):
        file.unlink()
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "stock.sql").write_text(STOCK)
    return copied


@pytest.fixture
def database(databases: Settings) -> Database:
    execute(databases, DELETES)
    execute(databases, "GRANT SELECT ON stock TO stock_sink_auditor")
    return Database(databases, "dedup")


def from_source(settings: Settings, spec: SinkSpec, *, dry_run: bool = False) -> RebuildResult:
    return rebuild.from_source(settings, spec, HERE, WHOLE, dry_run=dry_run)


def changed(result: RebuildResult, name: str = "stock") -> list[Difference]:
    found = result.rows[name]
    assert found.count == len(found.worst)
    return sorted(found.worst)


@pytest.mark.parametrize("name", SURVIVES_RE_SENDS)
def test_events_on_their_way_are_not_counted_twice(databases: Settings, folder: Path, name: str) -> None:
    execute(databases, DELETES)
    mine, others, late = history(1, 5), history(2, 2), history(3, 1)
    spec = spec_with(STRATEGIES[name], folder)
    with open_sink(databases, name) as sink:
        sink.apply(batch(mine[:2]))
        book(databases, *mine[:4], *others)
        assert [one.key for one in changed(from_source(databases, spec))] == [nth_key(1), nth_key(2)]
        assert Database(databases, name).totals() == sums([*mine[:4], *others])
        assert sink.apply(batch([*mine[2:], *others, *late], start=2)) == Counts(6, 2, 4)
    assert Database(databases, name).totals() == sums([*mine, *others, *late])


def test_the_state_of_an_erased_key_does_not_come_back(databases: Settings, database: Database, folder: Path) -> None:
    mine, others = history(1, 2), history(2, 2)
    book(databases, *mine, *others)
    spec = spec_with(STRATEGIES["dedup"], folder)
    erase.erase(databases, erase.subject(databases, "item", nth_key(1)))
    from_source(databases, spec)
    assert database.totals() == sums(others)
    later = history(1, 3)
    book(databases, *later)  # the service has written of the key since
    from_source(databases, spec)
    assert database.totals() == sums([*later, *others])


def test_what_is_wrong_is_set_and_the_rest_is_left_alone(databases: Settings, database: Database, folder: Path) -> None:
    right, wrong, missing = history(1, 2), history(2, 2), history(3, 2)
    book(databases, *right, *wrong, *missing)
    spec = spec_with(STRATEGIES["dedup"], folder)
    with open_sink(databases) as sink:
        sink.apply(batch([*right, *wrong, *missing]))
        sink.apply(batch([*right], start=6))
    execute(databases, f"UPDATE stock SET unit = 'LTR', version = 99 WHERE item_id = '{nth_key(2)}'")
    execute(databases, f"DELETE FROM stock WHERE item_id = '{nth_key(3)}'")
    execute(databases, f"INSERT INTO stock VALUES ('dedup', '{nth_key(4)}', 'KGM', 50, 7, 1)")
    execute(databases, f"INSERT INTO stock VALUES ('other', '{nth_key(4)}', 'KGM', 50, 7, 1)")
    before = database.query("SELECT * FROM stock ORDER BY sink, item_id")
    expected = [
        Difference(nth_key(2), "differs", {"unit": ("KGM", "LTR"), "version": (2, 99)}),
        Difference(
            nth_key(3),
            "missing",
            {"events": (2, None), "stock": (12, None), "unit": ("KGM", None), "version": (2, None)},
        ),
        Difference(
            nth_key(4),
            "surplus",
            {"events": (None, 1), "stock": (None, 50), "unit": (None, "KGM"), "version": (None, 7)},
        ),
    ]
    assert changed(from_source(databases, spec, dry_run=True)) == expected
    assert database.query("SELECT * FROM stock ORDER BY sink, item_id") == before
    assert changed(from_source(databases, spec)) == expected
    after = database.query("SELECT * FROM stock ORDER BY sink, item_id")
    assert [row[:6] for row in after] == [
        *(("dedup", nth_key(number), "KGM", 12, 2, 2) for number in (1, 2, 3)),
        ("other", nth_key(4), "KGM", 50, 7, 1),
    ]
    assert (after[0], after[-1]) == (before[0], before[-1]), "these rows were not written"
    assert changed(from_source(databases, spec)) == []
    [comparison] = comparison_files.load(spec)
    with (
        closing(connect(databases, SourceRole.AUDITOR)) as source,
        closing(connect(databases, SinkRole.AUDITOR)) as held,
    ):
        comparison = rows.describe(source, comparison)
        due = [row[1:] for row in rows.read_source(source, comparison)]
        assert sorted(due) == sorted(row[1:] for row in rows.read_sinks(held, comparison) if row[0] == "dedup")


VALUES = {
    "number": ("numeric", "12345678901234567890.10"),
    "ratio": ("double precision", "0.1::float8 + 0.2::float8"),
    "at": ("timestamptz", "'2026-07-01 12:00:00.000001+02'"),
    "local": ("timestamp", "'2026-07-01 12:00'"),
    "day": ("date", "'2026-07-01'"),
    "tags": ("text[]", "ARRAY['a', NULL, '']"),
    "data": ("jsonb", """'{"a": [1.50, null], "b": "\\"x"}'"""),
    "bytes": ("bytea", "'\\x00ff'"),
    "span": ("interval", "'1 day 02:03'"),
    "note": ("text", "NULL"),
    "empty": ("text", "''"),
    "key": ("text", "'a key'"),
    "due": ("bigint", "1"),
    "has": ("boolean", "true"),
}


def test_values_of_any_type_arrive_as_they_are(databases: Settings, tmp_path: Path) -> None:
    """Columns may be called as those of the engine's temporary tables."""
    columns = ", ".join(f"{name} {type_}" for name, (type_, _) in VALUES.items() if name != "key")
    made = ", ".join(f"{value}::{type_} AS {name}" for name, (type_, value) in VALUES.items() if name != "key")
    execute(databases, f"CREATE TABLE outbox_truth AS SELECT {made}", SourceRole.OWNER)
    execute(databases, "GRANT SELECT ON outbox_truth TO stock_source_auditor", SourceRole.OWNER)
    execute(databases, f"CREATE TABLE outbox_states (sink text, id text, {columns}, made timestamptz DEFAULT now())")
    execute(databases, "GRANT SELECT, INSERT, DELETE ON outbox_states TO stock_sink_writer")
    (tmp_path / "projections").mkdir()
    (tmp_path / "projections" / "truth.sql").write_text("INSERT INTO outbox_states (sink) SELECT %(sink)s")
    (tmp_path / "comparisons").mkdir()
    file = tmp_path / "comparisons" / "truth.sql"
    file.write_text("-- table: outbox_states (id)\n-- [source]\nSELECT 'x' AS key, * FROM outbox_truth\n")
    spec = spec_with(STRATEGIES["dedup"], tmp_path / "projections")
    [one] = changed(from_source(databases, spec), "truth")
    assert (one.key, one.row, one.columns["empty"], one.columns["note"]) == ("x", "missing", ("", None), (None, None))
    names = ", ".join(name for name in VALUES if name != "key")
    held = query(databases, SinkRole.OWNER, f"SELECT id, made IS NOT NULL, {names} FROM outbox_states")
    [due] = query(databases, SourceRole.OWNER, f"SELECT {names} FROM outbox_truth")
    assert held == [("x", True, *due)]
    assert changed(from_source(databases, spec), "truth") == []


@pytest.mark.parametrize(
    ("columns", "code", "problem"),
    [
        ("key, unit, total AS stock", "rebuild-unsupported", "does not return events, version of table stock"),
        ("key, unit, total, version, version AS events", "rebuild-unsupported", "no column total"),
        ("key", "rebuild-unsupported", "does not return events, stock"),
        ("nothing", "comparison-unusable", "does not exist"),
    ],
)
def test_a_query_that_does_not_make_whole_rows_is_refused(
    databases: Settings, folder: Path, columns: str, code: str, problem: str
) -> None:
    file = folder.parent / "comparisons" / "stock.sql"
    file.write_text(f"-- table: stock (item_id)\n-- [source]\nSELECT {columns} FROM source_totals\n")
    with raises(code, "stock.sql", problem):
        from_source(databases, spec_with(STRATEGIES["dedup"], folder))


def test_a_role_that_may_not_delete_is_refused_and_nothing_is_changed(databases: Settings, folder: Path) -> None:
    book(databases, *history(1, 2))
    with raises("database-refused", "permission denied for table stock"):
        from_source(databases, spec_with(STRATEGIES["dedup"], folder))
    assert Database(databases, "dedup").query("SELECT * FROM base_versions") == []


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO history (sink) SELECT %(sink)s",
        "INSERT INTO stock (sink) SELECT %(sink)s; update only public.history set n = 1",
        "WITH gone AS (DELETE FROM history RETURNING *) INSERT INTO stock SELECT FROM gone",
        "MERGE INTO history USING new_events ON true WHEN MATCHED THEN DO NOTHING",
    ],
)
def test_a_projection_that_writes_another_table_must_say_how_it_is_rebuilt(
    databases: Settings, folder: Path, text: str
) -> None:
    (folder / "history.sql").write_text(text)
    with raises("rebuild-unsupported", "history.rebuild.sql", "-- table: history"):
        from_source(databases, spec_with(STRATEGIES["dedup"], folder))


def test_what_a_projection_refuses_reads_or_comments_is_not_written_by_it(folder: Path) -> None:
    (folder / "stock.sql").write_text(
        "-- INSERT INTO history\nINSERT INTO rejections SELECT; SELECT FROM history FOR UPDATE OF history;"
        'INSERT INTO "stock" AS one SELECT ON CONFLICT (a) DO UPDATE\n   SET a = 1'
    )
    spec = spec_with(STRATEGIES["dedup"], folder)
    assert [table.name for table, _ in derived.derived(spec)] == ["stock"]
    (folder / "stock.rebuild.sql").write_text("SELECT")
    assert derived.derived(spec) == [], "the file of the project is used"


def test_two_comparisons_of_one_table_are_refused(folder: Path) -> None:
    shutil.copy(folder.parent / "comparisons" / "stock.sql", folder.parent / "comparisons" / "again.sql")
    with raises("comparison-unusable", "stock.sql", "again.sql declares table stock too"):
        derived.derived(spec_with(STRATEGIES["dedup"], folder))
