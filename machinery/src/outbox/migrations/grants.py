"""Rights of each role on the machinery's tables in both databases.

Each `outbox migrate` grants what is missing. What a role may do beyond that, `outbox doctor` reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    # Its rows are written by `outbox erase`, as the owner.
    "TABLE public.erased_keys": {SinkRole.WRITER: READ, SinkRole.AUDITOR: READ},
}

# An object that does not exist is left out: its privileges are NULL.
MISSING = r"""
SELECT what, role, privilege
  FROM unnest(%s, %s, %s) AS wanted (what, role, privilege),
       regexp_match(what, '(\w+) (.*)') AS object,
       regexp_match(privilege, '(\w+)(?: \((.*)\))?') AS part
 WHERE NOT CASE
           WHEN object[1] = 'FUNCTION' THEN has_function_privilege(role, to_regprocedure(object[2]), part[1])
           WHEN part[2] IS NULL THEN has_table_privilege(role, to_regclass(object[2]), part[1])
           ELSE (SELECT bool_and(has_column_privilege(role, to_regclass(object[2]), name, part[1]))
                   FROM regexp_split_to_table(part[2], ', ') AS name)
           END
"""
# A service with migrations of its own has no table of ours for HTTP, but maybe one of that name with another owner.
HAS_HTTP = """
SELECT EXISTS (SELECT FROM pg_class AS ours JOIN pg_class AS outbox ON outbox.relowner = ours.relowner
                WHERE ours.oid = to_regclass('public.idempotency_keys') AND outbox.oid = to_regclass('public.outbox'))
"""


def missing(settings: Settings, cursor: extensions.cursor, database: Database) -> list[str]:
    """The statements that grant what is missing in a database."""
    wanted = [
        (what, settings.role_name(role), privilege)
        for what, by_role in _wanted(cursor, database).items()
        for role, privileges in by_role.items()
        for privilege in privileges
    ]
    cursor.execute(MISSING, [[*column] for column in zip(*wanted, strict=True)])
    return [f'GRANT {privilege} ON {what} TO "{role}"' for what, role, privilege in cursor]


def _wanted(cursor: extensions.cursor, database: Database) -> Grants:
    if database == "sink":
        return SINKS
    cursor.execute(HAS_HTTP)
    ((has_http,),) = cursor.fetchall()
    return {**OUTBOX, **HTTP} if has_http else OUTBOX
