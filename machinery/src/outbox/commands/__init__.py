"""The commands that production has: a module for each, which is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import click


class Entry(NamedTuple):
    """A command, before it is imported. ``target`` is written as ``module:command``."""

    group: str
    target: str
    summary: str


class Moment(click.ParamType[datetime]):
    """A date or a time in ISO 8601; UTC if it has no offset."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time like 2026-11-21T05:00:00Z", param, ctx)
        return found if found.tzinfo else found.replace(tzinfo=UTC)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


COMMANDS = {
    "roles": Entry("Run", "outbox.commands.roles:roles_command", "make the databases, and a role for each part"),
    "migrate": Entry("Run", "outbox.commands.migrate:migrate_command", "upgrade both databases to the newest schema"),
    "connect": Entry("Run", "outbox.commands.connect:connect", "the Debezium connector: apply, status, render, remove"),
    "serve": Entry("Run", "outbox.commands.serve:serve", "run the service under gunicorn"),
    "sink": Entry("Run", "outbox.commands.sink:sink", "run sinks, on Spark or in a process alone"),
    "handle": Entry("Run", "outbox.commands.sink:handle", "call the project's handlers, each event once in effect"),
    "token": Entry("Run", "outbox.commands.serve:token", "print the token that clients of the service send"),
    "check": Entry(
        "Check",
        "outbox.commands.check:check_command",
        "compare source, topics and sinks: duplicates, losses, drift",
    ),
    "doctor": Entry("Check", "outbox.commands.check:doctor", "examine every hop, and say how to fix what is wrong"),
    "sql": Entry("Check", "outbox.commands.sql:sql_command", "look into a database, read-only: a statement, or psql"),
    "monitor": Entry(
        "Check",
        "outbox.commands.check:monitor_command",
        "serve metrics of the slot, the connector, dead letters and drift",
    ),
    "rewind": Entry("Repair", "outbox.commands.rewind:rewind_command", "reset a sink's offsets and replay"),
    "rebuild": Entry(
        "Repair", "outbox.commands.rebuild:rebuild_command", "recompute a sink's result from the topic or the source"
    ),
    "dead-letters": Entry(
        "Repair",
        "outbox.commands.dead_letters:dead_letters",
        "events that a sink could not apply: list, show, replay, discard",
    ),
    "prune": Entry(
        "Repair", "outbox.commands.prune:prune_command", "delete relayed outbox rows and expired deduplication ids"
    ),
    "erase": Entry("Repair", "outbox.commands.erase:erase_command", "remove the personal data of one key"),
}
