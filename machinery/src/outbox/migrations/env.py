"""Alembic's entry point to every history; `outbox migrate` runs it."""

from outbox.migrations.migrate import run

run()
