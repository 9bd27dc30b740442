"""Alembic's entry point to the ledger's migrations; `outbox migrate` runs it."""

from outbox.migrate import run

run()
