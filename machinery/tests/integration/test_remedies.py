"""The outbox takes declared events only, and `outbox migrate` widens and narrows what it takes. The doctor finds what
somebody changed in the databases, and its printed remedy repairs that.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from outbox.audit.doctor import Diagnosis, examine
from outbox.audit.source import snapshot
from outbox.base import project
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.events.catalog import load
from outbox.maintenance import prune
from outbox.migrations import declared
from outbox.migrations.migrate import is_current, migrate, owner_engine
from outbox.relay import connectors, slot
from outbox.relay.rest import Offset
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing import command
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import chosen_postgres
from outbox_lab.testing.helpers import query
from tests.support import suite
from tests.support.declared import Events
from tests.support.outbox_rows import remove_guard

HOPS = ("source-db", "slot", "sink-db")
FITS = "columns_fit_a_record"
CHECK = "CHECK (true)"
SKIPS_SINCE = 18  # the version of Postgres that reads over what was written without the publication
COLUMNS = "id, aggregatetype, aggregateid, type, payload"
POLICY = """
ALTER TABLE outbox ENABLE ROW LEVEL SECURITY;
CREATE POLICY writes ON outbox FOR INSERT WITH CHECK (true);
"""
EVENT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ('item', 'b', 'received', '{}')"


@pytest.fixture
def slotted(databases: Settings) -> Iterator[Settings]:
    """A migrated pair whose outbox has a slot; nobody reads it."""
    settings = databases.replace(connector=databases.source_db_url.name)
    migrate(settings)  # the markers of this connector
    query(settings, f"SELECT pg_create_logical_replication_slot('{settings.connector}', 'pgoutput')", SourceRole.CDC)
    yield settings
    query(settings, f"SELECT pg_drop_replication_slot('{settings.connector}')", SourceRole.CDC)


def problems(settings: Settings) -> list[Diagnosis]:
    """The problems that Postgres alone can have, except that no connector runs."""
    return [found for found in examine(settings, *HOPS) if not found.is_ok and found.code != "slot-unread"]


def carry_out(settings: Settings, postgres: Postgres, remedy: str) -> None:
    """Do what the doctor says: a command, or SQL."""
    if remedy == "`outbox migrate`":
        migrate(settings)
    else:
        assert remedy.isascii()
        assert "`" not in remedy
        postgres.psql(remedy, settings.source_db_url.name)


@pytest.mark.parametrize(
    ("damage", "codes"),
    [
        ("DROP PUBLICATION outbox", {"publication-wrong"}),
        (f"ALTER PUBLICATION outbox SET TABLE outbox ({COLUMNS})", {"publication-wrong"}),
        ("ALTER PUBLICATION outbox SET TABLE outbox WHERE (schema_version = 1)", {"publication-wrong"}),
        ("ALTER PUBLICATION outbox SET (publish = 'update, delete')", {"publication-wrong"}),
        ("ALTER TABLE outbox DROP CONSTRAINT event_is_declared", {"schema-behind", "events-unchecked"}),
        (f"ALTER TABLE outbox DROP CONSTRAINT {FITS}, ADD CONSTRAINT {FITS} {CHECK}", {"outbox-damaged"}),
        ("ALTER TABLE outbox DROP CONSTRAINT payload_fits_a_record", {"outbox-damaged"}),
        ("REVOKE SELECT ON outbox FROM {cdc}, {auditor}", {"outbox-damaged"}),
        ("REVOKE ALL ON outbox_version FROM {app}", {"outbox-damaged"}),
        ("GRANT SELECT, DELETE ON outbox TO {app}", {"outbox-readable"}),
        ("GRANT SELECT ON outbox TO PUBLIC", {"outbox-readable"}),
        (POLICY, {"rows-hidden"}),
        (f"{POLICY} ALTER TABLE outbox FORCE ROW LEVEL SECURITY", {"rows-hidden"}),
        ("REVOKE UPDATE ON positions FROM {sink_writer}", {"sink-db-damaged"}),
        ("REVOKE SELECT (sink, event_id) ON landed_events FROM {sink_pruner}", {"sink-db-damaged"}),
        ("REVOKE ALL ON FUNCTION ensure_processed_events FROM {sink_writer}", {"sink-db-damaged"}),
    ],
)
def test_a_remedy_repairs_what_the_doctor_has_found(
    slotted: Settings, postgres: Postgres, damage: str, codes: set[str]
) -> None:
    assert problems(slotted) == []
    names = {role.value: slotted.role_name(role) for role in SourceRole}
    names |= {f"sink_{role.value}": slotted.role_name(role) for role in SinkRole}
    owner = SinkRole.OWNER if codes == {"sink-db-damaged"} else SourceRole.OWNER
    query(slotted, damage.format(**names) if "{" in damage else damage, owner)
    found = problems(slotted)
    assert codes <= {one.code for one in found} <= {*codes, "outbox-damaged"}
    for remedy in dict.fromkeys(str(one.remedy) for one in found):
        carry_out(slotted, postgres, remedy)
    assert problems(slotted) == []
    assert migrate(slotted) == ({"source": [], "sink": []}, ([], [], []), [])


def test_a_publication_of_somebody_else_is_not_taken_away(slotted: Settings, postgres: Postgres) -> None:
    name = slotted.source_db_url.name
    postgres.psql("DROP PUBLICATION outbox", name)
    postgres.psql("CREATE PUBLICATION outbox FOR TABLE items", name)
    with raises("publication-foreign", "belongs to role postgres", "DROP PUBLICATION outbox"):
        migrate(slotted)
    postgres.psql("DROP PUBLICATION outbox", name)
    migrate(slotted)
    assert problems(slotted) == []


@pytest.mark.parametrize("damage", ["DROP PUBLICATION outbox", "ALTER PUBLICATION outbox SET TABLE outbox (id, type)"])
def test_a_repaired_publication_does_not_relay_what_was_written_before(slotted: Settings, damage: str) -> None:
    """So `outbox migrate` and the runbook name `outbox check`."""
    query(slotted, damage)
    query(slotted, EVENT, SourceRole.APP)
    [repaired] = migrate(slotted).repaired
    assert "`outbox check`" in repaired
    query(slotted, EVENT, SourceRole.APP)
    read = (
        "SELECT data FROM pg_logical_slot_peek_binary_changes"
        f"('{slotted.connector}', NULL, NULL, 'proto_version', '1', 'publication_names', 'outbox')"
    )
    if damage.startswith("DROP") and chosen_postgres() < SKIPS_SINCE:
        with pytest.raises(psycopg2.errors.UndefinedObject, match='publication "outbox" does not exist'):
            query(slotted, read, SourceRole.CDC)
        return
    sent = [bytes(data) for (data,) in query(slotted, read, SourceRole.CDC)]
    assert sum(data[:1] == b"I" and b"received" in data and b"{}" in data for data in sent) == 1


# A server that lacks what was relayed ------------------------------------------------------------------------------


def continue_from(settings: Settings, lsn: int, seconds_ago: float = 0) -> None:
    """What `outbox connect apply` checks with a stored offset, whose last event was committed so long ago."""
    offset = Offset(lsn, int((time.time() - seconds_ago) * 1e6))
    slot.require_continuity(settings, lambda: offset, connectors.load(settings))


def test_an_offset_beyond_the_end_of_the_log_is_refused(slotted: Settings) -> None:
    """As after a snapshot of the server's disk was put back, before the server has written as much as it lost."""
    query(slotted, EVENT, SourceRole.APP)
    end = slot.end_of_log(slotted)
    continue_from(slotted, end)
    with raises("source-restored", "`outbox connect remove --drop-slot`", "`outbox rebuild NAME --from source`"):
        continue_from(slotted, end + 2**30)


def test_younger_commits_before_the_offset_are_refused(slotted: Settings) -> None:
    """As after a snapshot was put back, and the server has written more than it lost."""
    begin = slot.end_of_log(slotted)
    query(slotted, EVENT, SourceRole.APP)
    end = slot.end_of_log(slotted)
    with raises("source-restored", "younger"):
        continue_from(slotted, end, seconds_ago=60)
    continue_from(slotted, begin, seconds_ago=60)  # a relay that was down: the commit comes after the offset
    continue_from(slotted, end)
    query(slotted, "DROP PUBLICATION outbox")
    query(slotted, EVENT, SourceRole.APP)
    continue_from(slotted, slot.end_of_log(slotted))  # nothing can be told, so nothing is refused


def test_apply_prune_and_check_refuse_an_outbox_with_hidden_rows(databases: Settings) -> None:
    """Debezium's own session fails too: its snapshot would relay nothing and say nothing."""
    query(databases, POLICY, SourceRole.OWNER)
    query(databases, EVENT, SourceRole.APP)  # the service writes beside it
    with raises("rows-hidden", "row-level security", "DISABLE ROW LEVEL SECURITY"):
        slot.require_whole_table(databases, connectors.load(databases))
    with raises("database-refused", "row-level security policy"):
        prune.count_old(databases, 0)
    with (
        raises("database-refused", "row-level security policy"),
        snapshot(databases, SourceRole.AUDITOR) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT count(*) FROM outbox")
    with (
        closing(psycopg2.connect(make_dsn(None, **databases.dsn(SourceRole.CDC)))) as connection,
        connection.cursor() as cursor,
        pytest.raises(psycopg2.errors.InsufficientPrivilege, match="row-level security policy"),
    ):
        cursor.execute("SELECT * FROM outbox")


# Declared events ----------------------------------------------------------------------------------------------------

INSERT = "INSERT INTO outbox (aggregatetype, aggregateid, type, payload, schema_version) VALUES (%s, '1', %s, '{}', %s)"
SCHEMA = json.dumps({"type": "object", "required": ["id"], "properties": {"id": {"type": "string"}}})
OLD, NEW = ("crate.sent.v1",), ("crate.sent.v1", "crate.sent.v2", "bin.line.added.v1")

DEFINITION = f"SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = '{declared.NAME}'"

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
        ("crate", "sent.v1", 1),
        ("crate", "line.added", 1),
        ("crate.sent", "v1", 1),
        ("bin.line", "added", 1),
        ("Crate", "sent", 1),
        ("outbox", "outbox.marker", 1),
        ("x.markers", "outbox.marker", 1),  # no topic is called so: the relay would stop
        ("outbox.markers", "outbox.marker", 2),
        ("x.markers", "sent", 1),
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


def test_a_column_that_would_not_fit_into_a_record_is_refused(databases: Settings) -> None:
    insert = "INSERT INTO outbox (aggregatetype, aggregateid, type, traceparent, payload) VALUES (%s, %s, %s, %s, '{}')"
    for place in range(4):
        row = ["a", "1", "b", None]
        row[place] = "ä" * 501  # 1002 bytes
        with pytest.raises(psycopg2.errors.CheckViolation, match=FITS):
            query(databases, insert, SourceRole.APP, row)
