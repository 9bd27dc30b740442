"""The table of the projection, in the database of the sinks."""

from __future__ import annotations

from alembic import op
from outbox.migrations import execute

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
GRANT SELECT, INSERT, UPDATE ON books_lent TO {writer};
GRANT SELECT ON books_lent TO {auditor};
"""


def upgrade() -> None:
    execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE books_lent;")
