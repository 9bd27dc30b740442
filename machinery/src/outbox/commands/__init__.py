"""The commands that production has: a module for each, which is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Entry(NamedTuple):
    """A command, before it is imported. ``target`` is written as ``module:command``."""

    group: str
    target: str
    summary: str


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)


COMMANDS = {
    "roles": Entry("Run", "outbox.commands.migrate:roles_command", "make the databases, and a role for each part"),
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
    "rewind": Entry("Repair", "outbox.commands.repair:rewind_command", "reset a sink's offsets and replay"),
    "rebuild": Entry(
        "Repair", "outbox.commands.repair:rebuild_command", "recompute a sink's result from the topic or the source"
    ),
    "dead-letters": Entry(
        "Repair",
        "outbox.commands.dead_letters:dead_letters",
        "events that a sink could not apply: list, show, replay, discard",
    ),
    "prune": Entry(
        "Repair", "outbox.commands.prune:prune_command", "delete relayed outbox rows and expired deduplication ids"
    ),
    "erase": Entry("Repair", "outbox.commands.prune:erase_command", "remove the personal data of one key"),
}
