"""The log of a part as `outbox dev` shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outbox_lab.stack.development import Shown

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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return tmp_path


def failed(project: Path, levels: int = 0) -> list[str]:
    """The traceback of a module of a project."""
    (project / "rules.py").write_text(CODE.replace("LEVELS", str(levels)))
    command = [sys.executable, str(project / "rules.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()


def record(level: str, **fields: object) -> str:
    return json.dumps({"timestamp": "2026-11-29T02:00:00Z", "level": level, "event": "happened", **fields})


@pytest.mark.parametrize("cut", [None, 3, 14])
def test_a_traceback_has_the_project_s_frames_in_however_many_pieces_it_comes(project: Path, cut: int | None) -> None:
    lines = ["before", *failed(project, levels=50), "after"]
    shown = Shown(project)
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


def test_records_below_a_warning_are_shown_if_asked_for(project: Path) -> None:
    lines = [record("info"), record("warning", sink="orders", in_s=2), "printed by the project"]
    noise = ["WARNING: Using incubator modules: jdk.incubator.vector"]
    quiet = ["WARNING happened sink=orders in_s=2", "printed by the project"]
    assert [*Shown(project).lines([*lines, *noise])] == quiet
    assert [*Shown(project, verbose=True).lines([*lines, *noise])] == ["INFO happened", *quiet, *noise]


def test_exception_of_a_record_has_the_project_s_frames(project: Path) -> None:
    lines = [*Shown(project).lines([record("error", exception="\n".join(failed(project)))])]
    assert lines[0] == "ERROR happened"
    assert lines[-1] == "RuntimeError: not an order"
    assert "json/decoder.py" not in "\n".join(lines)


def test_servers_show_warnings_and_errors_without_statements_and_frames(project: Path) -> None:
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
    assert [line.rpartition(" UTC [1] ")[2] for line in Shown(project).lines(log)] == [
        "app@shop ERROR:  division by zero",
        "2026-11-29T02:00:00,126 ERROR Connect: failed",
        "java.lang.RuntimeException: why",
        "Caused by: java.io.IOException: the cause",
    ]
    assert len([*Shown(project, verbose=True).lines(log)]) == len(log)
