"""The tables of the ledger, as the service uses them. The migrations create them; a test compares both."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    ForeignKey,
    MetaData,
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
    Column("label", Text, nullable=False, server_default=text("''")),
    Column("status", Text, nullable=False, server_default=text("'open'")),
    Column("account_version", BigInteger, nullable=False, server_default=text("0")),
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
