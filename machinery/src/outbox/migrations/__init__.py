"""The schema of both databases, by Alembic. The public API is for a project's own migrations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.facade import exports

if TYPE_CHECKING:
    from outbox.migrations.iceberg import make_iceberg_catalog
    from outbox.migrations.migrate import execute, role
else:  # when it is used: other modules do without Alembic
    __getattr__ = exports(
        __name__,
        {
            "execute": "outbox.migrations.migrate:execute",
            "make_iceberg_catalog": "outbox.migrations.iceberg:make_iceberg_catalog",
            "role": "outbox.migrations.migrate:role",
        },
    )

__all__ = ["execute", "make_iceberg_catalog", "role"]
