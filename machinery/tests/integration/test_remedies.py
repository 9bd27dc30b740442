"""The doctor finds changes that somebody made in the databases, and its printed remedy repairs them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from outbox.audit.doctor import Diagnosis, examine
from outbox.audit.source import snapshot
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.maintenance import prune
from outbox.migrations.migrate import migrate
from outbox.relay import connectors, slot
from outbox.relay.rest import Offset
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import chosen_postgres
from outbox_lab.testing.helpers import query

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


# Policies ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hidden(databases: Settings) -> Settings:
    """An outbox of two events, which a policy hides from everybody who reads; the service writes beside it."""
    query(databases, EVENT, SourceRole.APP)
    query(databases, POLICY, SourceRole.OWNER)
    query(databases, EVENT, SourceRole.APP)
    return databases


def test_a_reader_from_whom_rows_are_hidden_fails(hidden: Settings) -> None:
    """Debezium's own session too: its snapshot would relay nothing and say nothing."""
    for role in (SourceRole.CDC, SourceRole.PRUNER, SourceRole.AUDITOR):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege, match="row-level security policy"):
            query(hidden, "SELECT count(*) FROM outbox", role)
    with (
        closing(psycopg2.connect(make_dsn(None, **hidden.dsn(SourceRole.CDC)))) as connection,
        connection.cursor() as cursor,
        pytest.raises(psycopg2.errors.InsufficientPrivilege),
    ):
        cursor.execute("SELECT * FROM outbox")


def test_apply_prune_and_check_refuse_an_outbox_with_hidden_rows(hidden: Settings) -> None:
    with raises("rows-hidden", "row-level security", "DISABLE ROW LEVEL SECURITY"):
        slot.require_whole_table(hidden, connectors.load(hidden))
    with raises("database-refused", "row-level security policy"):
        prune.count_old(hidden, 0)
    with (
        raises("database-refused", "row-level security policy"),
        snapshot(hidden, SourceRole.AUDITOR) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT count(*) FROM outbox")


# Sessions ----------------------------------------------------------------------------------------------------------

# What databases may set otherwise, and what a session sets.
SET = {
    "client_encoding": ("'LATIN1'", "UTF8"),
    "DateStyle": ("'SQL, DMY'", "ISO, MDY"),
    "IntervalStyle": ("'iso_8601'", "postgres"),
    "TimeZone": ("'Pacific/Auckland'", "UTC"),
    "default_transaction_isolation": ("'serializable'", "read committed"),
    "quote_all_identifiers": ("on", "off"),
    "search_path": ("app, public", "public"),
    "standard_conforming_strings": ("off", "on"),
}


def test_a_session_sets_what_it_relies_on(databases: Settings, postgres: Postgres) -> None:
    for name in (databases.source_db_url.name, databases.sink_db_url.name):
        postgres.psql("; ".join(f"ALTER DATABASE {name} SET {key} = {value}" for key, (value, _) in SET.items()))
    for role in (*SourceRole, *SinkRole):
        with closing(connect(databases, role)) as connection, connection.cursor() as cursor:
            for name, (_, expected) in SET.items():
                cursor.execute(f"SHOW {name}")
                assert cursor.fetchall() == [(expected,)], (role, name)
            cursor.execute("SELECT timestamptz '9999-12-31T23:59:59Z', 'ä'")  # in Auckland it is the year 10000
            [(last, letter)] = cursor.fetchall()
            assert (last.isoformat(), letter) == ("9999-12-31T23:59:59+00:00", "ä")
    assert migrate(databases) == ({"source": [], "sink": []}, ([], [], []), []), "it knows its guard"
