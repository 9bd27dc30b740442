"""What `outbox.http` needs: the idempotency keys of the requests."""

from __future__ import annotations

from alembic import op

from outbox.migrations.migrate import execute

revision = "source_http_0001"
down_revision = None
branch_labels = ("http",)

UP = """
-- The answer is kept as it was sent: text, not jsonb.
CREATE TABLE idempotency_keys (
    client       text        NOT NULL,
    route        text        NOT NULL,
    key          text        NOT NULL,
    request_hash bytea       NOT NULL,
    status       smallint    NOT NULL,
    body         text        NOT NULL,
    expires_at   timestamptz NOT NULL,
    PRIMARY KEY (client, route, key)
);
CREATE INDEX idempotency_keys_expires_at ON idempotency_keys (expires_at);

GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO {app};
-- Readiness compares the schema with the code.
GRANT SELECT ON outbox_version TO {app};
"""


def upgrade() -> None:
    execute(UP)


def downgrade() -> None:
    op.execute("DROP TABLE idempotency_keys")
