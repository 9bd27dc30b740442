"""Single statements, run as a role."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from outbox.base.database import connect
from outbox.base.settings import Role, Settings, SourceRole


def query(
    settings: Settings, sql: str, role: Role = SourceRole.OWNER, parameters: object = None
) -> list[tuple[Any, ...]]:
    """Run one statement as a role, commit, and return its rows if it has any."""
    with closing(connect(settings, role)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(sql, parameters)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []
