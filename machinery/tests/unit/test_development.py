"""`outbox dev`: the files that it watches, and the output of the parts that it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outbox.base.settings import Settings, load
from outbox.events import catalog
from outbox_lab.stack import development, stack
from outbox_lab.stack.command import Command, ServiceCommand
from outbox_lab.stack.development import QUICK_S, SCHEMA, SERVICE, Development, Shown
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import PARTS, Deployment
from tests.support.declared import declare, work_for

SINKS = ("orders", "sales")


class Part(Process):
    """A part that runs, or not, as the test says."""

    runs = True
    starts = 0

    def is_running(self) -> bool:
        return self.runs

    def spawn(self) -> None:
        self.runs = True
        self.starts += 1


class Sinks(Part, Command):
    """Sinks that run from their start."""

    runs = False

    def stop(self) -> None:
        self.runs = False


class Service(Sinks, ServiceCommand):
    """A service that is never ready."""

    def is_ready(self) -> bool:
        return False


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
    return load(tmp_path, environment=False)


@pytest.fixture
def developed(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Developed:
    return Developed(settings, monkeypatch)


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


def test_events_that_are_declared_meanwhile_are_applied(
    developed: Developed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    applied: list[set[str]] = []
    monkeypatch.setattr(
        "outbox.migrations.migrate.migrate", lambda of: applied.append({*catalog.of_project(of).topics})
    )
    folder = work_for(tmp_path / "project", monkeypatch)
    declare(folder, "order")
    developed.start()
    declare(folder, "basket")
    developed.development.apply(SCHEMA)
    assert [len(topics) for topics in applied] == [1, 2]


# The log of a part as it is shown ------------------------------------------------------------------------------------

CODE = """
import json

def decide(text):
    try:
        return json.loads(text)
    except ValueError as error:
        raise RuntimeError("not an order") from error

decide("{")
"""


def record(level: str, **fields: object) -> str:
    return json.dumps({"timestamp": "2026-11-29T02:00:00Z", "level": level, "event": "happened", **fields})


@pytest.mark.parametrize("cut", [None, 3, 8])
def test_a_traceback_has_the_project_s_frames_in_however_many_pieces_it_comes(tmp_path: Path, cut: int | None) -> None:
    (tmp_path / "rules.py").write_text(CODE)
    command = [sys.executable, str(tmp_path / "rules.py")]
    traceback = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    lines = ["before", *traceback, "after"]
    shown = Shown(tmp_path)
    pieces = [lines] if cut is None else [lines[:cut], lines[cut:]]
    found = [line for piece in pieces for line in shown.lines(piece)]
    assert (found[0], found[-1]) == ("before", "after")
    text = "\n".join(found)
    assert 'File "rules.py", line 6, in decide' in text
    assert "json.decoder.JSONDecodeError: " in text
    assert "json/decoder.py" not in text
    assert found.count("RuntimeError: not an order") == 1
    of_record = [*Shown(tmp_path).lines([record("error", exception="\n".join(traceback))])]
    assert of_record == ["ERROR happened", *found[1:-1]]


def test_records_below_a_warning_are_shown_if_asked_for(tmp_path: Path) -> None:
    lines = [record("info"), record("warning", sink="orders", in_s=2), "printed by the project"]
    noise = ["WARNING: Using incubator modules: jdk.incubator.vector"]
    quiet = ["WARNING happened sink=orders in_s=2", "printed by the project"]
    assert [*Shown(tmp_path).lines([*lines, *noise])] == quiet
    assert [*Shown(tmp_path, verbose=True).lines([*lines, *noise])] == ["INFO happened", *quiet, *noise]


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
