"""Single statements, run as a role."""

from __future__ import annotations

from typing import Any

from outbox.base import database
from outbox.base.settings import Role, Settings, SourceRole


def query(
    settings: Settings, sql: str, role: Role = SourceRole.OWNER, parameters: object = None
) -> list[tuple[Any, ...]]:
    """Run one statement as a role, commit, and return its rows if it has any."""
    return database.query(settings, role, sql, parameters)
