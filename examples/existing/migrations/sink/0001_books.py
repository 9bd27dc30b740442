"""The table of the projection, in the database of the sinks."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute, role

revision = "sink_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("sink_machinery_0001",)

UP = """
CREATE TABLE books_lent (
    sink text    NOT NULL,
    isbn text    NOT NULL,
    lent numeric NOT NULL,
    PRIMARY KEY (sink, isbn)
);
"""


def upgrade() -> None:
    execute(UP)
    execute(f"GRANT SELECT, INSERT, UPDATE ON books_lent TO {role('writer')}")
    execute(f"GRANT SELECT ON books_lent TO {role('auditor')}")


def downgrade() -> None:
    op.execute("DROP TABLE books_lent;")
