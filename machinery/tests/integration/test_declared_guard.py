"""The outbox table takes declared events only, and `outbox migrate` widens and narrows what it takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
import pytest

from outbox.base import project
from outbox.base.database import connect
from outbox.base.settings import Settings, SourceRole
from outbox.events.catalog import load
from outbox.migrations import declared
from outbox.migrations.migrate import is_current, migrate, owner_engine
from outbox_lab.testing import command
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import query
from tests.support import suite
from tests.support.declared import Events
from tests.support.outbox_rows import remove_guard

INSERT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, schema_version) VALUES (%s, '1', %s, '{}', %s)"
SCHEMA = json.dumps({"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}})
OLD, NEW = ("crate.sent.v1",), ("crate.sent.v1", "crate.sent.v2", "bin.line.added.v1")

DEFINITION = f"SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = '{declared.NAME}'"
NO_TRACE = {"traceparent": None}
INSERT_LARGE = (
    "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) "
    "VALUES ('crate', '1', 'sent', to_jsonb(repeat('x', 1000001)))"
)
LONG = "ä" * 501  # 1002 bytes
INSERT_LONG = """
INSERT INTO outbox (aggregatetype, aggregateid, type, payload, traceparent)
VALUES (%(aggregatetype)s, %(aggregateid)s, %(type)s, '{}', %(traceparent)s)
"""

Declare = Callable[..., None]


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Makes the project of this process one that has the fixture domain's migrations, and declares these events."""
    monkeypatch.setattr(declared, "ATTEMPTS", 1)

    def declare(*names: str) -> None:
        root = tmp_path / str(hash(names))
        for name in names:
            aggregate, _, event = name.partition(".")
            events = Events(root / "events").aggregate(aggregate, 'key = "id"')
            events.write(f"{aggregate}/{event}.schema.json", SCHEMA)
        root.mkdir(exist_ok=True)
        migrations = suite.DOMAIN / "migrations"
        (root / "pyproject.toml").write_text(f'[tool.outbox]\nevents = "events"\nmigrations = "{migrations}"\n')
        monkeypatch.setenv(project.VARIABLE, str(root))

    yield declare
    load.cache_clear()


@pytest.fixture
def bare(databases: Settings) -> Settings:
    """A database that was migrated before there was a guard."""
    remove_guard(databases)
    return databases


def takes(settings: Settings, *event: object) -> bool:
    """Whether the service may insert an event: its aggregate type, type and version."""
    try:
        query(settings, INSERT, SourceRole.APP, [*event])
    except psycopg2.errors.CheckViolation as error:
        return error.diag.constraint_name != declared.NAME
    return True


@contextmanager
def holding(settings: Settings) -> Iterator[None]:
    """A transaction of the service that has written an event and is still open."""
    with closing(connect(settings, SourceRole.APP)) as connection, connection.cursor() as cursor:
        cursor.execute(INSERT, ["crate", "sent", 1])
        yield
        connection.commit()


def test_declared_events_are_taken_and_no_others(bare: Settings, declare: Declare) -> None:
    declare(*NEW)
    old_service_may_write = project.current().events / "crate" / "sent.v1.schema.json"
    old_service_may_write.write_text(json.dumps({**json.loads(SCHEMA), "deprecated": True}))
    assert migrate(bare).events.added == ["bin.line.added.v1", "crate.sent.v1", "crate.sent.v2"]
    others = [
        ("crate", "sent", 3),
        ("crate", "sent", 0),
        ("crate", "sent.v1", 1),
        ("crate", "line.added", 1),
        ("crate.sent", "v1", 1),
        ("bin.line", "added", 1),
        ("Crate", "sent", 1),
        ("crate ", "sent", 1),
        ("", "", 1),
        ("outbox", "outbox.marker", 1),
        ("x.markers", "outbox.marker", 1),  # no topic is called so: the relay would stop
        ("outbox.markers", "outbox.marker", 2),
        ("x.markers", "sent", 1),
        ("x.markers ", "outbox.marker", 1),
    ]
    assert [event for event in others if takes(bare, *event)] == []
    assert query(bare, "SELECT FROM outbox") == []
    for event in (("crate", "sent", 1), ("crate", "sent", 2), ("bin", "line.added", 1)):
        assert takes(bare, *event)
    query(bare, INSERT, SourceRole.PRUNER, [bare.markers_topic, "outbox.marker", 1])


# Rolling out -------------------------------------------------------------------------------------------------------


def test_an_older_image_that_migrates_again_removes_nothing(bare: Settings, declare: Declare) -> None:
    def is_ready() -> bool:
        with owner_engine(bare, "source").connect() as connection:
            return is_current(connection, "source")

    declare(*OLD)
    assert not is_ready(), "there is no constraint"
    migrate(bare)
    assert is_ready()
    assert not takes(bare, "bin", "line.added", 1)
    declare(*NEW)
    assert not is_ready(), "its events are not taken yet"
    assert migrate(bare).events == declared.Change(["bin.line.added.v1", "crate.sent.v2"], [], [])
    assert is_ready()
    declare(*OLD)
    assert is_ready()
    assert migrate(bare).events == declared.Change([], [], [])
    assert takes(bare, "bin", "line.added", 1)


def test_only_declared_removes_the_others(bare: Settings, declare: Declare, tmp_path: Path) -> None:
    def run(*options: str) -> str:
        done = command.outbox("migrate", *options, home=tmp_path, **bare.as_env())
        assert done.returncode == 0, done.stderr
        return done.stdout

    declare(*NEW)
    assert run("--only", "outbox").splitlines() == [
        "outbox     up to date",
        "events     added bin.line.added.v1, crate.sent.v1, crate.sent.v2",
    ]
    declare(*OLD)
    assert "events     up to date" in run()
    assert "events     removed bin.line.added.v1, crate.sent.v2" in run("--only-declared")
    assert takes(bare, "crate", "sent", 1)
    assert not takes(bare, "crate", "sent", 2)


def test_sets_that_migrate_at_once_are_both_taken(bare: Settings, declare: Declare) -> None:
    sets = []
    for names in (OLD, ("bin.line.added.v1",)):
        declare(*names)
        sets.append(declared.declared(bare))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: declared.guard(owner_engine(bare, "source"), one), sets))
    assert takes(bare, "crate", "sent", 1)
    assert takes(bare, "bin", "line.added", 1)


# Locks and faults --------------------------------------------------------------------------------------------------


def test_a_transaction_that_holds_the_table_is_named(bare: Settings, declare: Declare) -> None:
    declare(*OLD)
    with holding(bare):
        with raises("outbox-locked", bare.role_name(SourceRole.APP), "outbox migrate"):
            migrate(bare)
        query(bare, INSERT, SourceRole.APP, ["crate", "sent", 1])  # nobody waits behind it
    assert migrate(bare).events.added == [*OLD]
    with holding(bare):
        assert migrate(bare).events == declared.Change([], [], []), "without a change it waits for nobody"


def test_a_transaction_that_ends_in_time_is_waited_for(
    bare: Settings, declare: Declare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(declared, "ATTEMPTS", 20)
    declare(*OLD)
    with closing(connect(bare, SourceRole.APP)) as connection, connection.cursor() as cursor:
        cursor.execute(INSERT, ["crate", "sent", 1])
        timer = threading.Timer(declared.LOCK_TIMEOUT_S + 0.2, connection.commit)  # after the first attempt
        timer.start()
        assert migrate(bare).events.added == [*OLD]
        timer.join()


@pytest.mark.parametrize(
    "damage",
    [
        "ADD CONSTRAINT event_is_declared CHECK (type <> 'x')",
        "ADD CONSTRAINT event_is_declared CHECK (type <> 'x') NOT ENFORCED",
        "DROP CONSTRAINT payload_fits_a_record",
        "DROP CONSTRAINT columns_fit_a_record, ADD CONSTRAINT columns_fit_a_record CHECK (aggregateid <> '')",
    ],
)
def test_a_constraint_that_is_not_ours_is_replaced(bare: Settings, declare: Declare, damage: str) -> None:
    try:
        query(bare, f"ALTER TABLE outbox {damage}")
    except psycopg2.errors.SyntaxError:
        pytest.skip("this server cannot be damaged in this way")
    declare(*OLD)
    assert migrate(bare).events.added == [*OLD]
    assert not takes(bare, "crate", "lost", 1)
    with pytest.raises(psycopg2.errors.CheckViolation, match="columns_fit_a_record"):
        query(bare, INSERT_LONG, SourceRole.APP, {"aggregatetype": "a", "aggregateid": LONG, "type": "b"} | NO_TRACE)
    with pytest.raises(psycopg2.errors.CheckViolation, match="payload_fits_a_record"):
        query(bare, INSERT_LARGE, SourceRole.APP)
    assert migrate(bare).repaired == []


def test_a_guard_that_was_widened_by_hand_is_ours_again_with_its_events(bare: Settings, declare: Declare) -> None:
    declare(*NEW)
    migrate(bare)
    with owner_engine(bare, "source").connect() as connection:
        definition = connection.exec_driver_sql(DEFINITION).scalar()
    wider = str(definition).removesuffix(" NOT VALID").removesuffix(")") + " OR true)"
    drop = f"DROP CONSTRAINT {declared.NAME}"
    query(bare, f"ALTER TABLE outbox {drop}, ADD CONSTRAINT {declared.NAME} {wider}")
    assert takes(bare, "crate", "lost", 1)
    declare(*OLD)
    done = migrate(bare)
    assert (done.events.added, done.events.removed) == ([], [])
    assert done.repaired == [f"the constraint {declared.NAME}"]
    assert takes(bare, "crate", "sent", 2), "an older image removes nothing"
    assert not takes(bare, "crate", "lost", 1)


def test_an_unusable_declaration_changes_nothing(bare: Settings, declare: Declare) -> None:
    declare(*OLD)
    (project.current().events / "crate" / "sent.v2.schema.json").write_text("{")
    with raises("schema-unusable", "sent.v2.schema.json"):
        migrate(bare)
    assert takes(bare, "anything", "at all", 1)


def test_a_column_that_would_not_fit_into_a_record_is_refused(bare: Settings) -> None:
    row = {"aggregatetype": "a", "aggregateid": "1", "type": "b"} | NO_TRACE
    for column in row:
        with pytest.raises(psycopg2.errors.CheckViolation, match="columns_fit_a_record"):
            query(bare, INSERT_LONG, SourceRole.APP, {**row, column: LONG})
    query(bare, "ALTER TABLE outbox DROP CONSTRAINT columns_fit_a_record")
    query(bare, INSERT_LONG, SourceRole.APP, {**row, "aggregateid": LONG})
    assert migrate(bare).repaired == ["the constraint columns_fit_a_record"], "a longer row from before may stay"
    with pytest.raises(psycopg2.errors.CheckViolation):
        query(bare, INSERT_LONG, SourceRole.APP, {**row, "aggregateid": LONG})
