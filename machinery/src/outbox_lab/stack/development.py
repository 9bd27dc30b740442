"""Everything that a developer runs: the stack, the service and each sink, which start again when their files change.

| what changes | what happens |
|---|---|
| the service's package | the service starts again |
| files of a sink: its folder, and what its job names elsewhere | this sink starts again |
| other files in the package of the sinks | every sink starts again |
| ``connect/``, ``migrations/`` | declared events, migrations and connector are applied; service and sinks start again |

A part that ends starts again after a pause, which grows. One that ends quickly several times in a row stays down until
a file of the project changes. Each sink is a process of its own: Python has no other way to load a module anew.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox.sink import discovery
from outbox_lab.stack import ports
from outbox_lab.stack.command import ServiceCommand, sink
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import PARTS, Deployment

SERVICE, SINKS, SCHEMA = "service", "sinks", "schema"
PAGE = "/docs/swagger"  # outbox/web.py, asgi.py
WATCHED = {".py", ".sql", ".json", ".toml", ".csv", ".properties"}
QUICK_S = 60.0  # a part that ends sooner has not worked; Spark alone takes half of that on a busy machine
QUICK_ENDS_MAX = 3
PAUSE_S = 1.0  # before the first new start; each further one doubles it


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


@dataclass
class Part:
    """A part that runs, or that is to start again."""

    process: Process
    started_at: float = 0.0
    quick_ends: int = 0  # in a row
    is_down: bool = False  # it has ended, which was shown
    again_at: float | None = None  # when a part that is down starts again

    def started(self, now: float) -> None:
        """Note that the part was started."""
        self.started_at, self.is_down, self.again_at = now, False, None

    def ended(self, now: float) -> float | None:
        """Note that the part has ended, or could not start.

        Returns the pause before its next start in seconds; None if it stays down.
        """
        self.quick_ends = self.quick_ends + 1 if now - self.started_at < QUICK_S else 1
        self.is_down = True
        pause_s = PAUSE_S * 2.0 ** (self.quick_ends - 1) if self.quick_ends < QUICK_ENDS_MAX else None
        self.again_at = None if pause_s is None else now + pause_s
        return pause_s


class Development:
    """A deployment whose parts start again when they end or their files change."""

    def __init__(self, deployment: Deployment, sinks: Sequence[str], show: Show, *, verbose: bool = False) -> None:
        self._deployment, self._sinks, self._show, self._verbose = deployment, sinks, show, verbose
        self._parts: dict[str, Part] = {}  # all of them, by name
        self._servers: Iterator[str] = iter(())  # the parts of the stack, in turns for ever
        self._starting: ServiceCommand | None = None  # the service, until it is ready
        self._logs: dict[str, tuple[GrowingFile, Shown]] = {}
        ours = project.current()
        self._folders = {
            SERVICE: [ours.root / ours.service.partition(":")[0].partition(".")[0]],
            SINKS: [ours.root.joinpath(*ours.sinks_package.split("."))],
            SCHEMA: [ours.connect, ours.events, ours.migrations],
        }
        self._sink_files = sink_files()
        self._seen = self._look()

    def start(self) -> None:
        """Start everything. Raises Failure if the stack does not start; a failure of what is developed is shown."""
        stack = self._deployment.stack
        stack.up(report=lambda line: self._show("stack", line))
        servers = {name: stack.part(name) for name in PARTS}
        settings = self._deployment.settings  # with the ports that the stack has chosen
        sinks = [sink(settings, name) for name in self._sinks]
        started = (*servers.values(), self._deployment.service, *sinks)
        self._parts = {process.name: Part(process, time.monotonic()) for process in started}
        self._servers = itertools.cycle(servers)
        root = project.current().root
        self._logs = {
            name: (GrowingFile(part.process.log_file), Shown(root, verbose=self._verbose))
            for name, part in self._parts.items()
        }
        self.apply(SCHEMA)

    def step(self) -> None:
        """Show what the logs have got, start again what has changed or ended, and say what is ready.

        Each step looks at one part of the stack: to find a process takes a while.
        """
        self._follow()
        for what in self._changed():
            self._show("dev", f"{what}: changed")
            self.apply(what)
        for name in (*self._developed, next(self._servers)):
            self._look_after(name, self._parts[name])
        if self._starting and self._starting.is_ready():
            url = self._starting.url()
            page = f"; its API: {url}{PAGE}" if ports.answers(f"{url}{PAGE}") else ""
            self._show("dev", f"the service is on {url}{page}")
            self._starting = None

    def apply(self, what: str) -> None:
        """Apply a change of the schema, or of one part. A failure is shown."""
        try:
            if what == SCHEMA:
                catalog.load.cache_clear()  # migrations and connector are applied as by a command that begins now
                self._deployment.update(lambda line: self._show("dev", line))
        except Exception as error:  # a file of the project may be half written
            self._show_failed(error)
            return
        for name in self._developed if what == SCHEMA else [what]:
            self._parts[name].quick_ends = 0
            self._start(name, self._parts[name])

    def stop(self) -> None:
        """Stop everything."""
        with ThreadPoolExecutor() as pool:  # a sink finishes its batch
            for stopped in [pool.submit(self._parts[name].process.stop) for name in self._developed]:
                stopped.result()
        self._follow()
        self._deployment.stack.down(report=lambda line: self._show("stack", line))

    @property
    def _developed(self) -> list[str]:
        """The parts that are not of the stack."""
        return [name for name in self._parts if name not in PARTS]

    def _look_after(self, name: str, part: Part) -> None:
        """Start a part again that has ended, when its pause is over."""
        is_running = part.process.is_running()
        if part.is_down and is_running:  # `outbox up` has started it
            part.started(time.monotonic())
            self._show("dev", f"{name}: running again")
        elif part.is_down and part.again_at is not None and time.monotonic() >= part.again_at:
            self._start(name, part)
        elif not part.is_down and not is_running:
            self._follow()
            self._ended(name, part, "ended")

    def _ended(self, name: str, part: Part, why: str) -> None:
        """Show that a part has ended, below what it has said, and what follows."""
        pause_s = part.ended(time.monotonic())
        if pause_s is not None:
            follows = f"it starts again in {pause_s:.0f} s"
        elif name in PARTS:
            follows = f"`outbox logs {name}` says why, `outbox up` in another terminal starts it again"
        else:
            follows = "it starts again when one of its files changes"
        self._show("dev", f"{name}: {why} — {follows}")

    def _start(self, name: str, part: Part) -> None:
        """Start a part, again if it runs. A failure is shown: others may start."""
        part.started(time.monotonic())
        try:
            if name not in PARTS:
                part.process.stop()
            part.process.spawn()
        except Failure as failure:
            self._ended(name, part, f"not started: {failure}")
            return
        if isinstance(part.process, ServiceCommand):
            self._starting = part.process
        self._show("dev", f"{name}: starting")

    def _show_failed(self, error: Exception) -> None:
        lines = [str(error)]
        if not isinstance(error, Failure):
            logged = "".join(traceback.format_exception(error)).splitlines()
            lines = [*Shown(project.current().root).lines(logged)]
        for line in ("failed:", *lines) if len(lines) > 1 else (f"failed: {lines[0]}",):
            self._show("dev", line)

    def _follow(self) -> None:
        for name, (log, shown) in self._logs.items():
            for line in shown.lines(log.lines()):
                self._show(name, line)

    def _changed(self) -> list[str]:
        """The parts whose files have changed since the last call, or only the schema, which starts all others again."""
        before, self._seen = self._seen, self._look()
        changed = {what: {file for file, _ in before[what].items() ^ self._seen[what].items()} for what in before}
        if changed[SCHEMA]:
            return [SCHEMA]
        return [*([SERVICE] if changed[SERVICE] else []), *self._changed_sinks(changed[SINKS])]

    def _changed_sinks(self, files: Collection[Path]) -> list[str]:
        """The sinks to start again after a change of these files: also those that are down, as another's mistake in a
        module may be why.
        """
        owners = [
            {name for name, paths in self._sink_files.items() if any(file.is_relative_to(path) for path in paths)}
            for file in files
        ]
        is_shared, hit = not all(owners), set[str]().union(*owners)
        parts = {name: f"sink-{name}" for name in self._sinks} if files else {}
        return [part for name, part in parts.items() if is_shared or name in hit or self._parts[part].is_down]

    def _look(self) -> Mapping[str, Mapping[Path, int]]:
        return {what: file_states(folders) for what, folders in self._folders.items()}


def sink_files() -> Mapping[str, Sequence[Path]]:
    """By sink the folders and files that it is made of, as declared when the command began; none if they cannot be
    imported: then a change of any of them starts every sink again.
    """
    found: dict[str, Sequence[Path]] = {}
    with suppress(Exception):  # a file of the project may be half written
        for folder, job in discovery.declared(load()):
            paths = [folder, job.projections]
            if isinstance(job.strategy, Path):
                paths.append(job.strategy.resolve())
            if job.transform and (module := importlib.util.find_spec(job.transform.partition(":")[0])):
                paths.append(Path(str(module.origin)))
            found[job.name] = paths
    return found


def file_states(folders: list[Path]) -> dict[Path, int]:
    """When each file was changed last. Files and folders may be removed meanwhile: an editor, or git, does so."""
    states = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):  # it ignores a folder that is gone
            for file in (Path(parent, name) for name in names if Path(name).suffix in WATCHED):
                with suppress(OSError):
                    states[file] = file.stat().st_mtime_ns
    return states


QUIET = ("debug", "info")
# Levels of the servers' lines, as log4j2.properties and Postgres write them; a STATEMENT or DETAIL has values.
LEVEL = re.compile(
    r"^\d{4}-\d\d-\d\d[ T][\d:.,]+ .*?\b"
    r"(TRACE|DEBUG\d?|INFO|LOG|NOTICE|WARN|WARNING|ERROR|FATAL|PANIC|DETAIL|HINT|QUERY|CONTEXT|STATEMENT)\b:? "
)
LOUD = ("WARN", "WARNING", "ERROR", "FATAL", "PANIC")
FRAME = re.compile(r'^ +File "(.+?)", line \d+')
JVM_FRAME = re.compile(r"^\s+(at |\.\.\. \d+ more)")
# Each start of Spark prints these.
NOISE = ("NOTE: Picked up ", "WARNING: Using incubator modules", "Setting default log level", "To adjust logging level")
LEFT_OUT = ("timestamp", "level", "event", "exception", "logger")


class Shown:
    """Lines of one log, as they are shown. ``root`` is the project's folder."""

    def __init__(self, root: Path, *, verbose: bool = False) -> None:
        self._root, self._verbose = root, verbose
        self._is_foreign = False  # whether the last frame of a traceback is not of the project
        self._is_loud = True  # whether the last line with a level was shown: those below belong to it

    def lines(self, logged: Iterable[str]) -> Iterator[str]:
        """Show what a log has got since the last call."""
        for line in logged:
            record = _record(line)
            if record is None:
                yield from self._of_text(line)
            else:
                self._is_loud = True
                if self._verbose or record["level"] not in QUIET:
                    yield from self._of_record(record)

    def _of_text(self, line: str) -> Iterator[str]:
        if frame := FRAME.match(line):
            self._is_foreign = not is_ours(Path(frame[1]), self._root)
        elif not line.startswith("    "):
            self._is_foreign = False
        if level := LEVEL.match(line):
            self._is_loud = level[1] in LOUD
        is_shown = self._is_loud and not (self._is_foreign or JVM_FRAME.match(line) or line.startswith(NOISE))
        if line.strip() and (self._verbose or is_shown):
            yield line.replace(f"{self._root}/", "")

    def _of_record(self, record: dict[str, object]) -> Iterator[str]:
        fields = (f"{name}={_first(value)}" for name, value in record.items() if name not in LEFT_OUT)
        yield " ".join([str(record["level"]).upper(), _first(record["event"]), *fields])
        yield from Shown(self._root).lines(str(record.get("exception", "")).splitlines())


def is_ours(file: Path, root: Path) -> bool:
    """Whether a file is one of the project."""
    return file.is_relative_to(root) and not {".venv", "site-packages", "machinery"} & {*file.relative_to(root).parts}


def _record(line: str) -> dict[str, object] | None:
    """The record of our own log that a line is; None for other lines."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and {"level", "event"} <= found.keys() else None


def _first(value: object) -> str:
    """The first line of a value."""
    return next(iter(str(value).strip().splitlines()), "")
