"""`outbox dev`: the files that it watches, and the output of the parts that it runs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outbox.base.settings import Settings, address, load
from outbox.events import catalog
from outbox.sink import discovery
from outbox_lab.stack import development, ports, stack
from outbox_lab.stack.command import Command, ServiceCommand
from outbox_lab.stack.development import QUICK_S, SCHEMA, SERVICE, Development, Shown, file_states
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import PARTS, Deployment
from tests.support.declared import declare, work_for
from tests.support.suite import DOMAIN

APPLIED = ["databases migrated", "connector created: exactly-once"]
SINKS = ("orders", "sales")
STARTING = ["service: starting", "sink-orders: starting", "sink-sales: starting"]


class Part(Process):
    """A part that runs, or not, as the test says."""

    runs = True
    starts = 0

    def is_running(self) -> bool:
        return self.runs

    def spawn(self) -> None:
        self.prepare()
        self.runs = True
        self.starts += 1


class Sinks(Part, Command):
    """Sinks that run from their start."""

    runs = False
    answers = False

    def stop(self) -> None:
        self.runs = False

    def is_ready(self) -> bool:
        return self.runs and self.answers


class Service(Sinks, ServiceCommand):
    """A service that is ready when the test says so. It needs its port."""


class Developed:
    """`outbox dev` with parts that are models, and the lines of its own that it has shown."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts = {name: Part(name, settings.home) for name in PARTS}
        self.service = Service(SERVICE, settings, [])
        self.sinks = {name: Sinks(f"sink-{name}", settings, []) for name in SINKS}
        self.now = 1000.0
        self._shown: list[str] = []
        embedded: Any = SimpleNamespace(settings=settings, part=self.parts.get, up=lambda report: report("ready"))
        monkeypatch.setattr(stack, "service", lambda _: self.service)
        monkeypatch.setattr(development, "sink", lambda _, name: self.sinks[name])
        monkeypatch.setattr(development, "ports", SimpleNamespace(answers=lambda _: False))
        monkeypatch.setattr(development, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr("outbox.migrations.migrate.migrate", lambda _: None)
        relay = SimpleNamespace(apply=lambda _: "created", status=lambda _: SimpleNamespace(mode="exactly-once"))
        monkeypatch.setattr(stack, "lifecycle", relay)
        self.development = Development(Deployment(embedded), SINKS, self._show)

    def start(self) -> list[str]:
        """Start everything, and return what was shown."""
        self.development.start()
        return self._said()

    def look(self) -> list[str]:
        """Look at every part, and return what was shown."""
        for _ in PARTS:
            self.development.step()
        return self._said()

    def _show(self, part: str, line: str) -> None:
        if part == "dev":
            self._shown.append(line)

    def _said(self) -> list[str]:
        said = self._shown[:]
        self._shown.clear()
        return said


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings with a free port for the service."""
    return load(tmp_path, environment=False, service_bind=f"{ports.LOOPBACK}:{ports.choose(0)[0]}")


@pytest.fixture
def developed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Developed:
    return Developed(settings, monkeypatch)


def test_a_watched_file_may_be_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "b.sql", "notes.txt"):
        (tmp_path / name).touch()
    stat = Path.stat

    def with_removal(path: Path, **options: bool) -> os.stat_result:
        if path.name == "a.py":
            path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", with_removal)
    assert {file.name for file in file_states([tmp_path])} == {"b.sql"}


@pytest.mark.parametrize("name", ["connect", SERVICE])
def test_a_part_that_ends_starts_again_after_a_growing_pause_three_times_at_most(
    name: str, developed: Developed
) -> None:
    part: Any = {**developed.parts, **developed.sinks, SERVICE: developed.service}[name]
    developed.start()
    assert developed.look() == []
    developed.now += 2 * QUICK_S  # it has worked
    for pause_s in (1, 2):
        part.runs = False
        starts = part.starts
        assert developed.look() == [f"{part.name}: ended — it starts again in {pause_s} s"]
        developed.now += pause_s - 0.1
        assert developed.look() == []
        developed.now += 0.2
        assert developed.look() == [f"{part.name}: starting"]
        assert part.starts == starts + 1
    part.runs = False
    [given_up] = developed.look()
    assert given_up.startswith(f"{part.name}: ended — ")
    assert "again in" not in given_up
    developed.now += 10 * QUICK_S
    assert developed.look() == []
    if name in PARTS:
        part.runs = True  # as after `outbox up` in another terminal
        assert developed.look() == [f"{name}: running again"]
    else:
        developed.development.apply(part.name)
        assert developed.look() == [f"{part.name}: starting"]


def test_a_taken_port_of_the_service_does_not_keep_the_sinks_from_starting(
    developed: Developed, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "RELEASE_TIMEOUT_S", 0)
    developed.service.answers = True  # as the program does that has the port
    at = address(settings.service_bind)
    with socket.create_server(at):
        *applied, failed, first, second = developed.start()
        assert applied == APPLIED
        assert f"port {at[1]} of service is taken" in failed
        assert "end that program" in failed, "its remedy"
        assert [first, second] == STARTING[1:]
        assert developed.look() == [], "it is not ready"
    developed.development.apply(SERVICE)
    assert developed.look() == ["service: starting", f"the service is on {developed.service.url()}"]


def test_only_the_edited_sink_starts_again(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_for(tmp_path / "project", monkeypatch)
    package = tmp_path / "project/stock/sinks"
    files = {name: [package / name] for name in ("orders", "sales", "unused")}
    files["sales"].append(package / "orders/projections")  # as a job may say
    for folder in (*files["orders"], *files["sales"], *files["unused"]):
        folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(development, "sink_files", lambda: files)
    developed = Developed(settings, monkeypatch)
    developed.start()

    def edited(file: str) -> set[str]:
        before = {name: sink.starts for name, sink in developed.sinks.items()}
        (package / file).write_text(f"# {before}\n")
        os.utime(package / file, ns=(len(edits), len(edits)))
        edits.append(file)
        developed.look()
        return {name for name, sink in developed.sinks.items() if sink.starts > before[name]}

    edits: list[str] = []
    assert edited("orders/job.py") == {"orders"}
    assert edited("orders/projections/states.sql") == {"orders", "sales"}
    assert edited("unused/job.py") == set()
    assert edited("helpers.py") == {"orders", "sales"}
    developed.sinks["sales"].runs = False
    developed.look()
    assert edited("orders/job.py") == {"orders", "sales"}, "another's mistake may be why it is down"


def test_files_of_sinks_are_read_from_their_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = development.sink_files()
    assert found["dedup"][0].is_relative_to(DOMAIN / "stock/sinks")
    assert all(path.exists() for paths in found.values() for path in paths)

    def broken(_: Settings) -> Any:
        raise SyntaxError("job = (")

    monkeypatch.setattr(discovery, "declared", broken)
    assert development.sink_files() == {}


def test_events_that_are_declared_meanwhile_are_applied(
    developed: Developed, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[tuple[set[str], set[str]]] = []

    def noted(of: Settings) -> None:
        known = catalog.of_project(of)
        applied.append(({schema.name for schema in known.schemas}, set(known.topics)))

    monkeypatch.setattr("outbox.migrations.migrate.migrate", noted)
    folder = work_for(tmp_path / "project", monkeypatch)
    declare(folder, "order")
    before = set(catalog.of_project(settings).topics)
    developed.start()
    declare(folder, "basket")
    developed.development.apply(SCHEMA)
    [(_, topics), (names, topics_now)] = applied
    assert topics == before
    assert names == {"basket.changed.v1", "order.changed.v1"}
    assert len(topics_now - topics) == 1


def test_idle_chain_polls_less_often_unless_somebody_has_set_that(tmp_path: Path) -> None:
    (tmp_path / "stack.env").write_text("OUTBOX_CONNECTOR_POLL_INTERVAL_MS=5\n")  # the default, on purpose
    found = load(tmp_path, environment=False, defaults=stack.PATIENT_MS)
    assert (found.connector_poll_interval_ms, found.sink_trigger_interval_ms) == (5, 100)


# The log of a part as it is shown ------------------------------------------------------------------------------------

CODE = """
import json

def parse(text):
    secret = "hush"
    return json.loads(text)

def decide(text):
    try:
        return parse(text)
    except ValueError as error:
        raise RuntimeError("not an order") from error

def deep(levels):
    return deep(levels - 1) if levels else decide("{")

deep(LEVELS)
"""


def failed(folder: Path, levels: int = 0) -> list[str]:
    """The traceback of a module of a project."""
    (folder / "rules.py").write_text(CODE.replace("LEVELS", str(levels)))
    command = [sys.executable, str(folder / "rules.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()


def record(level: str, **fields: object) -> str:
    return json.dumps({"timestamp": "2026-11-29T02:00:00Z", "level": level, "event": "happened", **fields})


@pytest.mark.parametrize("cut", [None, 3, 14])
def test_a_traceback_has_the_project_s_frames_in_however_many_pieces_it_comes(tmp_path: Path, cut: int | None) -> None:
    lines = ["before", *failed(tmp_path, levels=50), "after"]
    shown = Shown(tmp_path)
    pieces = [lines] if cut is None else [lines[:cut], lines[cut:]]
    found = [line for piece in pieces for line in shown.lines(piece)]
    assert (found[0], found[-1]) == ("before", "after")
    text = "\n".join(found)
    assert 'File "rules.py", line 6, in parse' in text
    assert "return json.loads(text)" in text
    assert "json.decoder.JSONDecodeError: " in text
    assert "json/decoder.py" not in text
    assert "hush" not in text
    assert found.count("RuntimeError: not an order") == 1


def test_records_below_a_warning_are_shown_if_asked_for(tmp_path: Path) -> None:
    lines = [record("info"), record("warning", sink="orders", in_s=2), "printed by the project"]
    noise = ["WARNING: Using incubator modules: jdk.incubator.vector"]
    quiet = ["WARNING happened sink=orders in_s=2", "printed by the project"]
    assert [*Shown(tmp_path).lines([*lines, *noise])] == quiet
    assert [*Shown(tmp_path, verbose=True).lines([*lines, *noise])] == ["INFO happened", *quiet, *noise]


def test_exception_of_a_record_has_the_project_s_frames(tmp_path: Path) -> None:
    lines = [*Shown(tmp_path).lines([record("error", exception="\n".join(failed(tmp_path)))])]
    assert lines[0] == "ERROR happened"
    assert lines[-1] == "RuntimeError: not an order"
    assert "json/decoder.py" not in "\n".join(lines)


def test_servers_show_warnings_and_errors_without_statements_and_frames(tmp_path: Path) -> None:
    log = """\
2026-11-29 02:00:00.123 UTC [1] LOG:  database system is ready
2026-11-29 02:00:00.124 UTC [1] app@shop ERROR:  division by zero
2026-11-29 02:00:00.124 UTC [1] app@shop STATEMENT:  SELECT 'hush',
    1 / 0
2026-11-29T02:00:00,125 INFO  Connect: started
2026-11-29T02:00:00,126 ERROR Connect: failed
java.lang.RuntimeException: why
\tat org.apache.kafka.Connect.main(Connect.java:1)
Caused by: java.io.IOException: the cause
\t... 3 more
""".splitlines()
    assert [line.rpartition(" UTC [1] ")[2] for line in Shown(tmp_path).lines(log)] == [
        "app@shop ERROR:  division by zero",
        "2026-11-29T02:00:00,126 ERROR Connect: failed",
        "java.lang.RuntimeException: why",
        "Caused by: java.io.IOException: the cause",
    ]
    assert len([*Shown(tmp_path, verbose=True).lines(log)]) == len(log)
