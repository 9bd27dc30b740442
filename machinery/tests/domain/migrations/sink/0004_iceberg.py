"""The catalog of the Iceberg table that the tests give the sink `lakehouse`."""

from __future__ import annotations

from alembic import op

from outbox.migrations import make_iceberg_catalog

revision = "sink_domain_0004"
down_revision = "sink_domain_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    make_iceberg_catalog()


def downgrade() -> None:
    op.execute("DROP TABLE iceberg_tables; DROP TABLE iceberg_namespace_properties")
