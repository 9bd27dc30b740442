"""The schema of both databases, by Alembic. The public API is for a project's own migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.heavy import exports

if TYPE_CHECKING:
    from outbox.migrations.migrate import execute, make_iceberg_catalog, role
else:  # when it is used: other modules do without Alembic
    __getattr__ = exports(
        __name__,
        {
            "execute": "outbox.migrations.migrate:execute",
            "make_iceberg_catalog": "outbox.migrations.migrate:make_iceberg_catalog",
            "role": "outbox.migrations.migrate:role",
        },
    )

__all__ = ["execute", "make_iceberg_catalog", "role"]
