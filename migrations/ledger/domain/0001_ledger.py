"""Accounts, transfers, remembered answers, and the views that the auditor reads."""

from __future__ import annotations

from alembic import op

revision = "ledger_domain_0001"
down_revision = None
branch_labels = ("domain",)
depends_on = ("ledger_machinery_0001",)


def upgrade() -> None:
    # The checks are the last line of defence: service/ledger.py refuses first, with a reason.
    op.execute("""
        CREATE TABLE accounts (
            id            uuid        PRIMARY KEY DEFAULT uuidv7(),
            kind          text        NOT NULL CHECK (kind IN ('user', 'system')),
            currency      text        NOT NULL CHECK (currency ~ '^[A-Z]{3}$'),
            balance_minor bigint      NOT NULL DEFAULT 0,
            version       bigint      NOT NULL DEFAULT 0,
            created_at    timestamptz NOT NULL DEFAULT now(),
            CONSTRAINT user_accounts_are_covered CHECK (kind = 'system' OR balance_minor >= 0)
        )
    """)
    op.execute("""
        CREATE TABLE transfers (
            id              uuid        PRIMARY KEY,
            from_account_id uuid        NOT NULL REFERENCES accounts,
            to_account_id   uuid        NOT NULL REFERENCES accounts,
            amount_minor    bigint      NOT NULL CHECK (amount_minor > 0),
            currency        text        NOT NULL,
            created_at      timestamptz NOT NULL,
            CHECK (from_account_id <> to_account_id)
        )
    """)
    # The answer is kept as it was sent: text, not jsonb.
    op.execute("""
        CREATE TABLE idempotency_keys (
            client       text        NOT NULL,
            route        text        NOT NULL,
            key          text        NOT NULL,
            request_hash bytea       NOT NULL,
            status       smallint    NOT NULL,
            body         text        NOT NULL,
            expires_at   timestamptz NOT NULL,
            PRIMARY KEY (client, route, key)
        )
    """)
    op.execute("CREATE INDEX idempotency_keys_expires_at ON idempotency_keys (expires_at)")

    # What `outbox check` compares the topic and the sinks with: another domain keeps the columns' names and types.
    op.execute("""
        CREATE VIEW audit_accounts AS
        SELECT id::text AS key, balance_minor::numeric AS total, version
          FROM accounts
    """)
    op.execute("""
        CREATE VIEW audit_events AS
        SELECT id AS event_id, aggregateid AS key, (payload ->> 'amount')::numeric AS amount,
               (payload ->> 'version')::bigint AS version, occurred_at
          FROM outbox
    """)

    op.execute("GRANT SELECT, INSERT, UPDATE (balance_minor, version) ON accounts TO ledger_app")
    op.execute("GRANT SELECT, INSERT ON transfers TO ledger_app")
    op.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON idempotency_keys TO ledger_app")
    op.execute("GRANT SELECT ON audit_accounts, audit_events TO ledger_auditor")


def downgrade() -> None:
    op.execute("DROP VIEW audit_events, audit_accounts")
    op.execute("DROP TABLE idempotency_keys, transfers, accounts")
