"""The tables of the ledger, as the service uses them. The migrations make them; a test holds both together."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)

metadata = MetaData()

accounts = Table(
    "accounts",
    metadata,
    Column("id", Uuid, primary_key=True, server_default=text("uuidv7()")),
    Column("kind", Text, nullable=False),
    Column("currency", Text, nullable=False),
    Column("balance_minor", BigInteger, nullable=False, server_default=text("0")),
    Column("version", BigInteger, nullable=False, server_default=text("0")),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
)

transfers = Table(
    "transfers",
    metadata,
    Column("id", Uuid, primary_key=True),
    Column("from_account_id", Uuid, ForeignKey("accounts.id"), nullable=False),
    Column("to_account_id", Uuid, ForeignKey("accounts.id"), nullable=False),
    Column("amount_minor", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("created_at", DateTime(timezone=True), nullable=False),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("client", Text, primary_key=True),
    Column("route", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request_hash", LargeBinary, nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("body", Text, nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Index("idempotency_keys_expires_at", "expires_at"),
)
