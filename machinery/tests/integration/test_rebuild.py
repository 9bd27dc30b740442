"""Rebuilding against a real Postgres: from a source that is ahead of the sink, and by a copy that is swapped in.

The attack tries both in random orders of deliveries, restored sources and discards.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from outbox.base.database import connect, query
from outbox.base.settings import Role, Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka.topics import Topic
from outbox.maintenance import erase
from outbox.sink.applying.postgres.target import PostgresWriter
from outbox.sink.remembering import fence, positions
from outbox.sink.repair import rebuild
from outbox.sink.repair.rebuild import RebuildResult
from outbox.sink.rows import Difference
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Counts
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support.kept_rows import has_waiting
from tests.support.made_events import (
    PROJECTIONS,
    SPECS,
    TOPIC,
    TOPIC_ID,
    Event,
    batch,
    nth_key,
    sums,
    uuid7,
)
from tests.support.sink_driver import Database, open_sink, sink_on, spec_with

RANDOM = Random(8)  # noqa: S311
HERE = [Topic(TOPIC, TOPIC_ID, 1)]
WHOLE = {TOPIC: {0: 0}}


def history(count: int, number: int = 1) -> list[Event]:
    """The first events of an item, no two sums of them alike."""
    made, total = list[Event](), 0
    for version in range(1, count + 1):
        total += 3**version
        made.append(Event(uuid7(RANDOM), nth_key(number), 3**version, version, total_after=total))
    return made


def book(settings: Settings, *events: Event) -> None:
    """Let the source's items be as after these events; each item's come in order."""
    last = {event.key: event for event in events}
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        for event in last.values():
            cursor.execute(
                "INSERT INTO items (id, unit, stock, version) VALUES (%s, 'KGM', %s, %s)"
                " ON CONFLICT (id) DO UPDATE SET stock = excluded.stock, version = excluded.version",
                (event.key, event.total_after, event.version),
            )


def from_source(settings: Settings, sink: str | SinkSpec = "dedup", *, dry_run: bool = False) -> RebuildResult:
    spec = SPECS[sink] if isinstance(sink, str) else sink
    return rebuild.from_source(settings, spec, HERE, WHOLE, dry_run=dry_run)


def execute(settings: Settings, sql: str, role: Role = SinkRole.OWNER) -> None:
    query(settings, role, sql)


def everything(settings: Settings) -> Mapping[str, list[tuple[object, ...]]]:
    """All rows of all tables."""
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'")
        found = {}
        for (table,) in cursor.fetchall():
            cursor.execute(f"SELECT * FROM {table} AS one ORDER BY one::text")
            found[table] = cursor.fetchall()
        return found


@contextmanager
def copying(settings: Settings) -> Iterator[PostgresWriter]:
    """The copy of the sink `dedup`, prepared, with the fence until the end of the block."""
    with rebuild.reserved(settings, "dedup") as owner:
        rebuild.begin(owner, "dedup", HERE, WHOLE)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield sink_on(connection, name=rebuild.copy_of("dedup"))


def swap(settings: Settings) -> None:
    with rebuild.reserved(settings, "dedup") as owner:
        rebuild.swap(owner, "dedup", HERE, WHOLE)


SOURCE_WITHOUT_VERSION = """
DROP VIEW source_totals;
CREATE VIEW source_totals AS SELECT id::text AS key, stock AS total FROM items;
GRANT SELECT ON source_totals TO stock_source_auditor;
"""


class TestFromSource:
    @pytest.mark.parametrize("name", ["upsert", "versions"])
    def test_events_of_a_key_that_was_deleted_are_no_news_when_they_are_sent_again(
        self, databases: Settings, name: str
    ) -> None:
        gone = history(2)
        with open_sink(databases, name) as sink:
            sink.apply(batch(gone))
            for one in gone:
                execute(
                    databases,
                    "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES"
                    f" ('{one.event_id}', 'item', '{one.key}', 'picked', '{{\"version\": {one.version}}}')",
                    SourceRole.OWNER,
                )
            from_source(databases, name)
            assert sink.apply(batch(gone, start=2)) == Counts(2, 0, 2)

    def test_a_sink_that_has_never_run_begins_with_the_sources_totals(
        self, databases: Settings, database: Database
    ) -> None:
        mine = history(4)
        book(databases, *mine[:3])
        from_source(databases)
        with open_sink(databases) as sink:
            sink.begin_at({TOPIC: {0: 100}}, {TOPIC: TOPIC_ID})
            sink.apply(batch(mine[2:], start=100))
        assert database.totals() == sums(mine)

    def test_the_source_is_read_after_the_sinks_transaction(self, databases: Settings, database: Database) -> None:
        """Or an event could be applied that is not in the base, and not be left out when it comes again."""
        mine = history(2)
        book(databases, *mine[:1])
        thread = threading.Thread(target=from_source, args=(databases,))
        with closing(connect(databases, SinkRole.WRITER)) as sink, sink, sink.cursor() as cursor:
            fence.lock(cursor, "dedup")
            thread.start()
            wait_for("the rebuild to wait", lambda: has_waiting(databases), timeout_s=20)
            book(databases, *mine)
        thread.join()
        assert database.totals() == sums(mine)

    def test_killed_before_its_commit_it_has_done_nothing(self, databases: Settings, tmp_path: Path) -> None:
        mine = history(3)
        book(databases, *mine)
        with open_sink(databases) as sink:
            sink.apply(batch(mine[:1]))
        deadly = tmp_path / "deadly.rebuild.sql"
        (setting,) = PROJECTIONS.glob("*.rebuild.sql")
        deadly.write_text(f"{setting.read_text()} SELECT pg_terminate_backend(pg_backend_pid());")
        before = everything(databases)
        with raises("database-connection-lost", "sink dedup"):
            from_source(databases, spec_with(projections=tmp_path))
        assert everything(databases) == before

    def test_a_source_whose_totals_have_no_version_is_refused(self, databases: Settings) -> None:
        execute(databases, SOURCE_WITHOUT_VERSION, SourceRole.OWNER)
        before = everything(databases)
        with raises("rebuild-unsupported", "source_totals"):
            from_source(databases)
        assert everything(databases) == before

    def test_each_projection_must_say_how_it_is_rebuilt(self, databases: Settings, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(PROJECTIONS, tmp_path / "projections"))
        (folder / "history.sql").write_text("SELECT")
        with raises("rebuild-unsupported", "history.rebuild.sql"):
            from_source(databases, spec_with(projections=folder))


MINE = (
    "CREATE TABLE mine (sink text, note text); GRANT SELECT, INSERT ON mine TO stock_sink_writer;"
    "INSERT INTO mine VALUES ('dedup', 'old'), ('dedup.rebuild', 'new'), ('naive', 'other')"
)


class TestFromTopic:
    def test_every_table_with_a_column_sink_takes_part(self, databases: Settings, database: Database) -> None:
        mine = history(4)
        execute(databases, MINE)
        with open_sink(databases) as live, open_sink(databases, "naive") as other:
            for sink in (live, other):
                sink.apply(batch(mine[:2]))
        with copying(databases) as copy:
            copy.apply(batch(mine))
        swap(databases)
        assert database.query("SELECT * FROM mine ORDER BY sink") == [("dedup", "new"), ("naive", "other")]
        assert (database.processed(), database.positions()) == (4, {0: 4})
        left = "SELECT FROM {} WHERE sink = 'dedup.rebuild'"
        assert not any(database.query(left.format(table)) for table in ("stock", "processed_events", "positions"))
        assert Database(databases, "naive").totals() == sums(mine[:2])

    def test_killed_in_the_swap_nothing_has_changed(self, databases: Settings, database: Database) -> None:
        mine = history(4)
        # The last table by name: when its rows are renamed, the others' are.
        execute(databases, f"{MINE}; ALTER TABLE mine RENAME TO zzz")
        with open_sink(databases) as live:
            live.apply(batch(mine[:2]))
            with copying(databases) as copy:
                copy.apply(batch(mine))
            execute(
                databases,
                "CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS"
                " 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN new; END';"
                "CREATE TRIGGER die BEFORE UPDATE ON zzz FOR EACH ROW EXECUTE FUNCTION die()",
            )
            before = everything(databases)
            with raises("database-connection-lost", "sink dedup"):
                swap(databases)
            assert everything(databases) == before
            assert live.apply(batch(mine[2:3], start=2)) == Counts(1, 1)
            execute(databases, "DROP TRIGGER die ON zzz")
            swap(databases)
        assert database.totals() == sums(mine)

    def test_what_cannot_be_rebuilt_from_the_topic_is_refused(self, databases: Settings) -> None:
        with rebuild.reserved(databases, "dedup") as owner:
            with raises("sink-unknown"):
                rebuild.begin(owner, "dedup", HERE, WHOLE)
            with open_sink(databases) as live:
                live.apply(batch(history(2)))
            with raises("topic-incomplete", "partition 0 begins at offset 5", "--from source"):
                rebuild.begin(owner, "dedup", HERE, {TOPIC: {0: 5, 1: 0}})
            with raises("topic-recreated", TOPIC, "--from source"):
                rebuild.begin(owner, "dedup", [Topic(TOPIC, "topic-2", 1)], WHOLE)
            execute(databases, "UPDATE positions SET topic_id = 'topic-0'")
            with closing(connect(databases, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
                assert positions.accept_recreated(cursor, "dedup", TOPIC, TOPIC_ID)
                connection.commit()
            with raises("topic-recreated", TOPIC, "--from source"):  # what came before is nowhere else
                rebuild.begin(owner, "dedup", HERE, WHOLE)
            execute(databases, "UPDATE positions SET is_recreated = false")
            with raises("copy-missing"):
                rebuild.swap(owner, "dedup", HERE, WHOLE)
            with raises("rebuild-running"):
                swap(databases)
            rebuild.begin(owner, "dedup", HERE, WHOLE)
            with raises("events-lost", "offsets 0 to 2"):
                rebuild.swap(owner, "dedup", HERE, {TOPIC: {0: 3}})


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("dedup --from source --drop-copy", 2, "is for --from topic"),
        ("lakehouse --from source --yes", 1, "there is nothing to recompute — `outbox rewind lakehouse --to-earliest`"),
    ],
)
def test_a_command_that_cannot_rebuild_says_so(databases: Settings, words: str, status: int, said: str) -> None:
    done = outbox("rebuild", *words.split(), home=databases.home, **databases.as_env())
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr


# Tables that comparisons of rows declare ------------------------------------------------------------------------------

# Of the fixture domain: each event is a version.
STOCK = """
-- table: stock (item_id)
--
-- [source]
SELECT key, unit, total AS stock, version, version AS events FROM source_totals;
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The projections of the fixture domain, without a file that rebuilds them; and a comparison of rows."""
    copied = Path(shutil.copytree(PROJECTIONS, tmp_path / "projections"))
    for file in copied.glob("*.rebuild.sql"):
        file.unlink()
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "stock.sql").write_text(STOCK)
    return copied


def changed(result: RebuildResult, name: str = "stock") -> list[Difference]:
    found = result.rows[name]
    assert found.count == len(found.worst)
    return sorted(found.worst)


def test_what_is_wrong_is_set_and_the_rest_is_left_alone(databases: Settings, database: Database, folder: Path) -> None:
    right, wrong, missing, erased = (history(2, number) for number in (1, 2, 3, 5))
    book(databases, *right, *wrong, *missing, *erased)
    spec = spec_with(projections=folder)
    execute(databases, "GRANT DELETE ON stock TO stock_sink_writer; GRANT SELECT ON stock TO stock_sink_auditor")
    with open_sink(databases) as sink:
        sink.apply(batch([*right, *wrong, *missing]))
    erase.erase(databases, erase.subject(databases, "item", nth_key(5)))
    execute(databases, f"UPDATE stock SET unit = 'LTR', version = 99 WHERE item_id = '{nth_key(2)}'")
    execute(databases, f"DELETE FROM stock WHERE item_id = '{nth_key(3)}'")
    execute(databases, f"INSERT INTO stock VALUES ('dedup', '{nth_key(4)}', 'KGM', 50, 7, 1)")
    execute(databases, f"INSERT INTO stock VALUES ('other', '{nth_key(4)}', 'KGM', 50, 7, 1)")
    rows = "SELECT * FROM stock ORDER BY sink, item_id"
    before = database.query(rows)
    expected = [(nth_key(2), "differs"), (nth_key(3), "missing"), (nth_key(4), "surplus")]
    found = changed(from_source(databases, spec, dry_run=True))
    assert [(one.key, one.row) for one in found] == expected
    assert found[0].columns == {"unit": ("KGM", "LTR"), "version": (2, 99)}
    assert database.query(rows) == before
    assert changed(from_source(databases, spec)) == found
    after = database.query(rows)
    assert [row[:6] for row in after] == [
        *(("dedup", nth_key(number), "KGM", 12, 2, 2) for number in (1, 2, 3)),
        ("other", nth_key(4), "KGM", 50, 7, 1),
    ]
    assert (after[0], after[-1]) == (before[0], before[-1]), "these rows were not written"
    assert changed(from_source(databases, spec)) == []
    erase.erase(databases, erase.subject(databases, "item", nth_key(6)))  # the service had deleted it
    book(databases, *history(3, 5), *history(1, 6))  # the service has written of both since
    later = [(nth_key(5), "missing"), (nth_key(6), "missing")]
    assert [(one.key, one.row) for one in changed(from_source(databases, spec))] == later


VALUES = {
    "number": "12345678901234567890.10::numeric",
    "ratio": "0.1::float8 + 0.2::float8",
    "at": "'2026-07-01 12:00:00.000001+02'::timestamptz",
    "local": "'2026-07-01 12:00'::timestamp",
    "day": "'2026-07-01'::date",
    "tags": "ARRAY['a', NULL, '']",
    "data": """'{"a": [1.50, null], "b": "\\"x"}'::jsonb""",
    "bytes": "'\\x00ff'::bytea",
    "span": "'1 day 02:03'::interval",
    "note": "NULL::text",
    "empty": "''::text",
    "due": "1::bigint",
    "has": "true",
}


def test_values_of_any_type_arrive_as_they_are(databases: Settings, tmp_path: Path) -> None:
    """Columns may be called as those of the engine's temporary tables."""
    made = f"SELECT {', '.join(f'{value} AS {name}' for name, value in VALUES.items())}"
    execute(databases, f"CREATE TABLE outbox_truth AS {made}", SourceRole.OWNER)
    execute(databases, "GRANT SELECT ON outbox_truth TO stock_source_auditor", SourceRole.OWNER)
    execute(databases, f"CREATE TABLE outbox_states AS SELECT 'x' AS sink, 'x' AS id, one.* FROM ({made}) AS one")
    execute(databases, "TRUNCATE outbox_states; ALTER TABLE outbox_states ADD made timestamptz DEFAULT now()")
    execute(databases, "GRANT SELECT, INSERT, DELETE ON outbox_states TO stock_sink_writer")
    (tmp_path / "projections").mkdir()
    (tmp_path / "projections" / "truth.sql").write_text("INSERT INTO outbox_states (sink) SELECT %(sink)s")
    (tmp_path / "comparisons").mkdir()
    file = tmp_path / "comparisons" / "truth.sql"
    file.write_text("-- table: outbox_states (id)\n-- [source]\nSELECT 'x' AS key, * FROM outbox_truth\n")
    spec = spec_with(projections=tmp_path / "projections")
    [one] = changed(from_source(databases, spec), "truth")
    assert (one.key, one.row, one.columns["empty"], one.columns["note"]) == ("x", "missing", ("", None), (None, None))
    names = ", ".join(VALUES)
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
        from_source(databases, spec_with(projections=folder))


@pytest.mark.parametrize(
    "text",
    [
        "INSERT INTO history (sink) SELECT %(sink)s",
        "INSERT INTO stock (sink) SELECT %(sink)s; update only public.history set n = 1",
        "WITH gone AS (DELETE FROM history RETURNING *) INSERT INTO stock SELECT FROM gone",
        "MERGE INTO history USING new_events ON true WHEN MATCHED THEN DO NOTHING",
    ],
)
def test_a_projection_that_writes_another_table_must_say_how_it_is_rebuilt(folder: Path, text: str) -> None:
    (folder / "history.sql").write_text(text)
    with raises("rebuild-unsupported", "history.rebuild.sql", "-- table: history"):
        rebuild.derived_tables(spec_with(projections=folder))


def test_what_a_projection_refuses_reads_or_comments_is_not_written_by_it(folder: Path) -> None:
    (folder / "stock.sql").write_text(
        "-- INSERT INTO history\nINSERT INTO rejections SELECT; SELECT FROM history FOR UPDATE OF history;"
        'INSERT INTO "stock" AS one SELECT ON CONFLICT (a) DO UPDATE\n   SET a = 1'
    )
    spec = spec_with(projections=folder)
    assert [one.name for one in rebuild.derived_tables(spec)] == ["stock"]
    (folder / "stock.rebuild.sql").write_text("SELECT")
    assert rebuild.derived_tables(spec) == [], "the file of the project is used"


def test_two_comparisons_of_one_table_are_refused(folder: Path) -> None:
    shutil.copy(folder.parent / "comparisons" / "stock.sql", folder.parent / "comparisons" / "again.sql")
    with raises("comparison-unusable", "stock.sql", "again.sql declares table stock too"):
        rebuild.derived_tables(spec_with(projections=folder))
