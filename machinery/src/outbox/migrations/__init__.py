"""The schema of both databases, by Alembic. The public API is `execute`, which a project's own migrations call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.facade import exports

if TYPE_CHECKING:
    from outbox.migrations.migrate import execute
else:  # when it is used: other modules do without Alembic
    __getattr__ = exports(__name__, {"execute": "outbox.migrations.migrate:execute"})

__all__ = ["execute"]
