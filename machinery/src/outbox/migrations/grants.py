"""Rights of each role on the machinery's tables in both databases.

A migration grants it with its tables, and each `outbox migrate` what is missing. What a role may do beyond that,
`outbox doctor` reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from psycopg2 import extensions

from outbox.base.settings import Role, Settings, SinkRole, SourceRole

Database = Literal["source", "sink"]
Grants = Mapping[str, Mapping[Role, Sequence[str]]]  # by what is granted and role, the privileges

OUTBOX: Grants = {
    "TABLE public.outbox": {
        # The service writes events, and can neither read, change nor delete them.
        SourceRole.APP: ("INSERT",),
        SourceRole.CDC: ("SELECT",),
        SourceRole.AUDITOR: ("SELECT",),
        # `outbox prune` also inserts: its marker takes the way of every event.
        SourceRole.PRUNER: ("SELECT", "INSERT", "DELETE"),
    },
}
HTTP: Grants = {
    "TABLE public.idempotency_keys": {SourceRole.APP: ("SELECT", "INSERT", "UPDATE", "DELETE")},
    "TABLE public.outbox_version": {SourceRole.APP: ("SELECT",)},  # readiness compares the schema with the code
}
READ, ADD, WRITE = ("SELECT",), ("SELECT", "INSERT"), ("SELECT", "INSERT", "UPDATE")
SINKS: Grants = {
    "TABLE public.sinks": {SinkRole.WRITER: WRITE, SinkRole.PRUNER: READ, SinkRole.AUDITOR: READ},
    "TABLE public.positions": {SinkRole.WRITER: WRITE, SinkRole.PRUNER: READ, SinkRole.AUDITOR: READ},
    "TABLE public.checkpoint_generations": {SinkRole.WRITER: ADD},
    "TABLE public.base_versions": {SinkRole.WRITER: WRITE, SinkRole.AUDITOR: READ},
    "TABLE public.skipped_events": {SinkRole.WRITER: (*ADD, "DELETE"), SinkRole.AUDITOR: READ},
    "TABLE public.dead_letters": {
        SinkRole.WRITER: WRITE,
        # A sink cannot forget what it has applied. Only the pruner can; it reads the id and place of an event, and no
        # content.
        SinkRole.PRUNER: ("SELECT (sink, identity, topic, event_id, is_event, status, last_seen_at)", "DELETE"),
        SinkRole.AUDITOR: READ,
    },
    "TABLE public.key_versions": {SinkRole.WRITER: WRITE},
    "TABLE public.applied_versions": {SinkRole.WRITER: WRITE},
    "TABLE public.processed_events": {SinkRole.WRITER: ADD},
    "TABLE public.landed_events": {SinkRole.WRITER: ADD, SinkRole.PRUNER: ("SELECT (sink, event_id)", "DELETE")},
    "TABLE public.processed_changes": {SinkRole.WRITER: ADD, SinkRole.PRUNER: ("SELECT", "DELETE")},
    "TABLE public.dedup_horizon": {SinkRole.WRITER: READ, SinkRole.PRUNER: READ, SinkRole.AUDITOR: READ},
    "TABLE public.processed_partitions": {SinkRole.WRITER: READ, SinkRole.PRUNER: READ, SinkRole.AUDITOR: READ},
    "FUNCTION public.ensure_processed_events(date[])": {SinkRole.WRITER: ("EXECUTE",)},
    "FUNCTION public.drop_processed_events(date)": {SinkRole.PRUNER: ("EXECUTE",)},
}
# Its rows are written by `outbox erase`, as the owner.
ERASED_KEYS: Grants = {"TABLE public.erased_keys": {SinkRole.WRITER: READ, SinkRole.AUDITOR: READ}}

# Null for an object that does not exist yet: the migration that makes it grants it.
KINDS = {
    "TABLE": "SELECT has_table_privilege(%s, to_regclass(%s)::oid, %s)",
    "FUNCTION": "SELECT has_function_privilege(%s, to_regprocedure(%s)::oid, %s)",
}
HAS_COLUMNS = """
SELECT bool_and(has_column_privilege(%s, to_regclass(%s)::oid, name, %s)) FROM unnest(%s) AS name
"""
# A service with migrations of its own has no table of ours for HTTP, but maybe one of that name with another owner.
HAS_HTTP = """
SELECT EXISTS (SELECT FROM pg_class AS ours JOIN pg_class AS outbox ON outbox.relowner = ours.relowner
                WHERE ours.oid = to_regclass('public.idempotency_keys') AND outbox.oid = to_regclass('public.outbox'))
"""


def statements(settings: Settings, grants: Grants) -> list[str]:
    """The statements that grant all of this."""
    return [
        _statement(privileges, what, settings.role_name(role))
        for what, by_role in grants.items()
        for role, privileges in by_role.items()
    ]


def missing(settings: Settings, cursor: extensions.cursor, database: Database) -> list[str]:
    """The statements that grant what is missing in a database."""
    return [
        _statement(privileges, what, settings.role_name(role))
        for what, by_role in _wanted(cursor, database).items()
        for role, wanted in by_role.items()
        if (privileges := _missing(cursor, what, settings.role_name(role), wanted))
    ]


def _wanted(cursor: extensions.cursor, database: Database) -> Grants:
    if database == "sink":
        return {**SINKS, **ERASED_KEYS}
    cursor.execute(HAS_HTTP)
    ((has_http,),) = cursor.fetchall()
    return {**OUTBOX, **HTTP} if has_http else OUTBOX


def _missing(cursor: extensions.cursor, what: str, role: str, wanted: Sequence[str]) -> list[str]:
    """The privileges that a role does not have."""
    word, name = what.split(" ", 1)
    found = []
    for privilege in wanted:
        kind, _, columns = privilege.partition(" ")
        if columns:
            cursor.execute(HAS_COLUMNS, [role, name, kind, columns.strip("()").split(", ")])
        else:
            cursor.execute(KINDS[word], [role, name, kind])
        if cursor.fetchall() == [(False,)]:
            found.append(privilege)
    return found


def _statement(privileges: Iterable[str], what: str, role: str) -> str:
    return f'GRANT {", ".join(privileges)} ON {what} TO "{role}"'
