"""What each role may do with the machinery's tables in the service's database.

A migration grants it with its table, and each `outbox migrate` what is missing. What a role may do beyond that,
`outbox doctor` reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from psycopg2 import extensions

from outbox.base.settings import Settings, SourceRole

OUTBOX = ("outbox",)
HTTP = ("idempotency_keys", "outbox_version")
GRANTS: dict[str, Mapping[SourceRole, tuple[str, ...]]] = {
    "outbox": {
        # The service writes events, and can neither read, change nor delete them.
        SourceRole.APP: ("INSERT",),
        SourceRole.CDC: ("SELECT",),
        SourceRole.AUDITOR: ("SELECT",),
        # `outbox prune` also inserts: its marker takes the way of every event.
        SourceRole.PRUNER: ("SELECT", "INSERT", "DELETE"),
    },
    "idempotency_keys": {SourceRole.APP: ("SELECT", "INSERT", "UPDATE", "DELETE")},
    "outbox_version": {SourceRole.APP: ("SELECT",)},  # readiness compares the schema with the code
}
MISSING = "SELECT privilege FROM unnest(%s) AS privilege WHERE NOT has_table_privilege(%s, %s, privilege)"
# A service with migrations of its own has no table of ours for HTTP, but maybe one of that name with another owner.
HAS_HTTP = """
SELECT EXISTS (SELECT FROM pg_class AS ours JOIN pg_class AS outbox ON outbox.relowner = ours.relowner
                WHERE ours.oid = to_regclass('public.idempotency_keys') AND outbox.oid = to_regclass('public.outbox'))
"""


def statements(settings: Settings, tables: Iterable[str]) -> list[str]:
    """The statements that grant all that the roles need on these tables."""
    return [
        _statement(privileges, table, settings.role_name(role))
        for table in tables
        for role, privileges in GRANTS[table].items()
    ]


def missing(settings: Settings, cursor: extensions.cursor) -> list[str]:
    """The statements that grant what is missing."""
    cursor.execute(HAS_HTTP)
    ((has_http,),) = cursor.fetchall()
    found = []
    for table in OUTBOX + HTTP if has_http else OUTBOX:
        for role, wanted in GRANTS[table].items():
            cursor.execute(MISSING, [[*wanted], settings.role_name(role), f"public.{table}"])
            privileges = [privilege for (privilege,) in cursor]
            if privileges:
                found.append(_statement(privileges, table, settings.role_name(role)))
    return found


def _statement(privileges: Iterable[str], table: str, role: str) -> str:
    return f'GRANT {", ".join(privileges)} ON public.{table} TO "{role}"'
