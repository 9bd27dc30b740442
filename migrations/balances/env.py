"""Alembic's entry point to the balances database's migrations; `outbox migrate` runs it."""

from outbox.migrate import run

run()
