"""Everything that a developer runs: the stack, service and sinks, which start again when their files change.

| what changes | what happens |
|---|---|
| the service's package | the service starts again |
| the package of the sinks | the sinks start again |
| ``connect/``, ``migrations/`` | declared events, migrations and connector are applied; both start again |

A service or sinks that fail stay down until a file changes; a part of the stack that ends, until `outbox up` starts it.
What they say is in their logs, which are shown.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.events import catalog
from outbox_lab.stack.command import Command, ServiceCommand
from outbox_lab.stack.deployment import Deployment
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import PARTS

SERVICE, SINKS, SCHEMA = "service", "sinks", "schema"
AGAIN = "it starts again when one of its files changes"
WATCHED = {".py", ".sql", ".json", ".toml", ".csv", ".properties"}
Show = Callable[[str, str], None]  # a part's name, and a line of it


class GrowingFile:
    """The lines that another process appends to a log from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """The complete lines since the last call. A file that was truncated is read from its beginning."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if file.seek(0, 2) < self._offset:
                self._offset = 0
            file.seek(self._offset)
            complete = file.read().rpartition(b"\n")[0]
        if not complete:
            return []
        self._offset += len(complete) + 1
        return complete.decode(errors="replace").split("\n")


class Development:
    """A deployment whose service and sinks start again when their files change."""

    def __init__(self, deployment: Deployment, show: Show) -> None:
        self._deployment, self._show = deployment, show
        self._parts: dict[str, Command] = {}
        self._servers: Iterator[tuple[str, Process]] = iter(())  # the parts of the stack, in turns for ever
        self._starting: ServiceCommand | None = None  # the service, until it is ready
        self._logs: dict[str, GrowingFile] = {}
        self._down: set[str] = set()  # parts that have ended, which was shown
        self._folders = _folders()
        self._seen = self._look()

    def start(self) -> None:
        """Start everything. Raises Failure if the stack does not start; a failure of what is developed is shown."""
        stack = self._deployment.stack
        stack.up(report=lambda line: self._show("stack", line))
        self._parts = {SERVICE: self._deployment.service, SINKS: self._deployment.sinks}
        servers = {name: stack.part(name) for name in PARTS}
        self._servers = itertools.cycle(servers.items())
        self._logs = {name: GrowingFile(part.log_file) for name, part in {**servers, **self._parts}.items()}
        self.apply(SCHEMA)

    def step(self) -> None:
        """Show what the logs have got, restart what has changed, and say what is ready and what has ended.

        Each step looks at one part of the stack: to find a process takes a while.
        """
        self._follow()
        for what in self._changed():
            self._show("dev", f"{what}: changed")
            self.apply(what)
        for name, part in self._parts.items():
            if name not in self._down and not part.is_running():
                self._show_end(name, AGAIN)
        name, server = next(self._servers)
        if not server.is_running():
            self._show_end(name, f"`outbox up` in another terminal starts it again, `outbox logs {name}` says why")
        elif name in self._down:
            self._down.remove(name)
            self._show("dev", f"{name}: running again")
        if self._starting and self._starting.is_ready():
            self._show("dev", f"the service is on {self._starting.url()}")
            self._starting = None

    def apply(self, what: str) -> None:
        """Apply a change of the schema, of the service or of the sinks. A failure is shown."""
        try:
            if what == SCHEMA:
                catalog.load.cache_clear()  # migrations and connector are applied as by a command that begins now
                self._deployment.update(lambda line: self._show("dev", line))
        except Failure as failure:
            self._show("dev", f"failed: {failure}")
            return
        for name, part in self._parts.items():
            if what in (name, SCHEMA):
                self._restart(name, part)

    def stop(self) -> None:
        """Stop everything."""
        for part in self._parts.values():
            part.stop()
        self._follow()
        self._deployment.stack.down(report=lambda line: self._show("stack", line))

    def _restart(self, name: str, part: Command) -> None:
        """Restart service or sinks. A failure is shown: the other may start."""
        try:
            part.stop()
            part.spawn()
        except Failure as failure:
            if not part.is_running():
                self._down.add(name)
            self._show("dev", f"{name}: not started: {failure}; {AGAIN}")
            return
        self._down.discard(name)
        if isinstance(part, ServiceCommand):
            self._starting = part
        self._show("dev", f"{name}: starting")

    def _show_end(self, name: str, remedy: str) -> None:
        """Show once that a part has ended, below what it has said."""
        if name not in self._down:
            self._down.add(name)
            self._follow()
            self._show("dev", f"{name}: ended — {remedy}")

    def _follow(self) -> None:
        for name, log in self._logs.items():
            for line in log.lines():
                self._show(name, line)

    def _changed(self) -> list[str]:
        """The parts whose files have changed since the last call. A change of the schema restarts the others too."""
        now = self._look()
        changed = [what for what in now if now[what] != self._seen[what]]
        self._seen = now
        return [SCHEMA] if SCHEMA in changed else changed

    def _look(self) -> Mapping[str, Mapping[Path, int]]:
        return {what: file_states(folders) for what, folders in self._folders.items()}


def _folders() -> Mapping[str, list[Path]]:
    """The folders of what is developed."""
    ours = project.current()
    return {
        SERVICE: [ours.root / ours.service.partition(":")[0].partition(".")[0]],
        SINKS: [ours.root.joinpath(*ours.sinks_package.split("."))],
        SCHEMA: [ours.connect, ours.events, ours.migrations],
    }


def file_states(folders: list[Path]) -> dict[Path, int]:
    """When each file was changed last. Files and folders may be removed meanwhile: an editor, or git, does so."""
    states = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):  # it ignores a folder that is gone
            for file in (Path(parent, name) for name in names if Path(name).suffix in WATCHED):
                with suppress(OSError):
                    states[file] = file.stat().st_mtime_ns
    return states
