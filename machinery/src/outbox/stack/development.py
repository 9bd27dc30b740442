"""Everything that a developer runs: the stack, service and sinks, which start again when their files change.

| what changes | what happens |
|---|---|
| the service's package | the service starts again |
| the package of the sinks | the sinks start again |
| ``connect/``, ``migrations/`` | migrations and connector are applied; both start again |

A part that fails stays down until a file changes. What it says is in its log, which is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.migrations.migrate import migrate
from outbox.relay import lifecycle
from outbox.stack.command import Command, service, sink
from outbox.stack.growing import GrowingFile
from outbox.stack.stack import PARTS, Stack

SERVICE, SINKS, SCHEMA = "service", "sinks", "schema"
WATCHED = {".py", ".sql", ".json", ".toml", ".csv", ".properties"}
Show = Callable[[str, str], None]  # a part's name, and a line of it


class Development:
    """A stack with service and sinks of the project."""

    def __init__(self, stack: Stack, names: tuple[str, ...], show: Show) -> None:
        """``names`` are sinks in place of those of [tool.outbox]."""
        self._stack, self._names, self._show = stack, names, show
        self._parts: dict[str, Command] = {}
        self._logs: dict[str, GrowingFile] = {}
        self._down: set[str] = set()  # parts that have ended, which was shown
        self._folders = _folders()
        self._seen = self._look()

    def start(self) -> None:
        """Start everything. Raises Failure if the stack does not start; a failure of what is developed is shown."""
        self._stack.up(report=lambda line: self._show("stack", line))
        settings = self._stack.settings.model_copy(update={"log_format": "text"})
        self._parts = {SERVICE: service(settings), SINKS: sink(settings, *self._names)}
        logs = {name: self._stack.part(name).log_file for name in PARTS}
        logs |= {name: part.log_file for name, part in self._parts.items()}
        self._logs = {name: GrowingFile(file) for name, file in logs.items()}
        self._apply(settings, SCHEMA)

    def step(self) -> None:
        """Show what the logs have got, restart what has changed, and say what has ended."""
        self._follow()
        for what in self._changed():
            self._show("dev", f"{what} has changed")
            self._apply(self._stack.settings, what)
        for name, part in self._parts.items():
            if name not in self._down and not part.is_running():
                self._down.add(name)
                self._follow()
                self._show("dev", f"{name} has ended, and starts again when one of its files changes")

    def stop(self) -> None:
        """Stop everything."""
        for part in self._parts.values():
            part.stop()
        self._follow()
        self._stack.down(report=lambda line: self._show("stack", line))

    def _apply(self, settings: Settings, what: str) -> None:
        try:
            if what == SCHEMA:
                migrate(settings)
                self._show("dev", f"connector {lifecycle.apply(settings)}")
            for name, part in self._parts.items():
                if what in (name, SCHEMA):
                    self._restart(name, part)
        except Failure as failure:
            self._show("dev", f"failed: {failure}")

    def _restart(self, name: str, part: Command) -> None:
        self._down.discard(name)
        part.stop()
        part.spawn()
        self._show("dev", f"{name} starts")

    def _follow(self) -> None:
        for name, log in self._logs.items():
            for line in log.lines():
                self._show(name, line)

    def _changed(self) -> list[str]:
        """What has changed since the last call. A change of the schema restarts the others too."""
        now = self._look()
        changed = [what for what in now if now[what] != self._seen[what]]
        self._seen = now
        return [SCHEMA] if SCHEMA in changed else changed

    def _look(self) -> Mapping[str, Mapping[Path, int]]:
        return {what: _states(folders) for what, folders in self._folders.items()}


def _folders() -> Mapping[str, list[Path]]:
    """The folders of what is developed."""
    ours = project.current()
    return {
        SERVICE: [ours.root / ours.service.partition(":")[0].partition(".")[0]],
        SINKS: [ours.root.joinpath(*ours.sinks_package.split("."))],
        SCHEMA: [ours.connect, ours.events, ours.migrations],
    }


def _states(folders: list[Path]) -> dict[Path, int]:
    """When each file was changed last. Files and folders may be removed meanwhile: an editor, or git, does so."""
    states = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):  # it ignores a folder that is gone
            for file in (Path(parent, name) for name in names if Path(name).suffix in WATCHED):
                with suppress(OSError):
                    states[file] = file.stat().st_mtime_ns
    return states
