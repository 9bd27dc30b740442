"""The table of `outbox.http`: the idempotency keys of the requests."""

from __future__ import annotations

from outbox.migrations.migrate import execute

revision = "source_http_0001"
down_revision = None
branch_labels = ("http",)

UP = """
-- The answer is kept as it was sent: text, not jsonb.
CREATE TABLE public.idempotency_keys (
    client       text        NOT NULL,
    route        text        NOT NULL,
    key          text        NOT NULL,
    request_hash bytea       NOT NULL,
    status       smallint    NOT NULL,
    body         text        NOT NULL,
    expires_at   timestamptz NOT NULL,
    PRIMARY KEY (client, route, key)
);
CREATE INDEX idempotency_keys_expires_at ON public.idempotency_keys (expires_at);
"""


def upgrade() -> None:
    execute(UP)
