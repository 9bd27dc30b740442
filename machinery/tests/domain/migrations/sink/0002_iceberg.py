"""The catalog of the Iceberg table that the tests give the sink `lakehouse`."""

from __future__ import annotations

from outbox.migrations import make_iceberg_catalog

revision = "sink_domain_0002"
down_revision = "sink_domain_0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    make_iceberg_catalog()
