"""The schema of both databases, by Alembic. The public API is for a project's own migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.facade import exports

if TYPE_CHECKING:
    from outbox.migrations.migrate import execute, role
else:  # when it is used: other modules do without Alembic
    __getattr__ = exports(__name__, {name: f"outbox.migrations.migrate:{name}" for name in ("execute", "role")})

__all__ = ["execute", "role"]
