"""The commands that develop and prove: `outbox` has them where this package is."""

from __future__ import annotations

from outbox.commands import Entry

COMMANDS = {
    "dev": Entry("Run", "outbox_lab.commands.stack:dev", "run everything in one terminal; restart what you edit"),
    "new": Entry("Run", "outbox_lab.commands.new:new", "write the files of an event, a version or a sink"),
    "demo": Entry(
        "Run", "outbox_lab.commands.demo:demo", "the walkthrough: break the chain on purpose, compare every total"
    ),
    "up": Entry("Run", "outbox_lab.commands.stack:up", "start the embedded stack, or the parts that do not run"),
    "down": Entry("Run", "outbox_lab.commands.stack:down", "stop the embedded stack; data stays"),
    "reset": Entry("Run", "outbox_lab.commands.stack:reset", "stop the embedded stack and delete its data"),
    "status": Entry("Check", "outbox_lab.commands.stack:status", "the parts of the embedded stack"),
    "logs": Entry("Check", "outbox_lab.commands.stack:logs", "the log of one part of the embedded stack"),
    "events": Entry(
        "Check", "outbox_lab.commands.events:events", "the declared events; check examples, upcasters and edits"
    ),
    "soak": Entry("Check", "outbox_lab.commands.soak:soak", "break every hop at random, and judge the result"),
}
