"""`outbox dev`: everything in one terminal, and what is edited starts again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox.base import project
from outbox.base.settings import load
from outbox.base.wait import wait_for
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.command import environment
from tests.support import suite
from tests.support.paths import ROOT

TIMEOUT_S = 120
SQL = Path("stock", "sinks", "stock", "projections", "stock.sql")


class Terminal:
    """The output of the command."""

    def __init__(self, file: Path, process: subprocess.Popen[bytes]) -> None:
        self._file, self._process, self._read = file, process, 0

    def wait(self, *lines: str) -> None:
        """Wait for lines that match, in any order, behind those of the wait before."""

        def found() -> bool:
            assert self._process.poll() is None, self._file.read_text()
            text = self._file.read_text()
            matches = [match for line in lines if (match := re.compile(line).search(text, self._read))]
            if len(matches) < len(lines):
                return False
            self._read = max(match.end() for match in matches)
            return True

        try:
            wait_for(f"lines {lines}", found, timeout_s=TIMEOUT_S)
        except TimeoutError:
            pytest.fail(f"not all of the lines {lines} in\n{self._file.read_text()}")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixture domain, to edit."""
    folder = suite.copied_to(tmp_path / "project")
    monkeypatch.setenv(project.VARIABLE, str(folder))
    return folder


@contextmanager
def terminal(home: Path, folder: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    file, path = home / "terminal", os.pathsep.join([str(folder), str(ROOT)])
    with file.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "outbox", "dev", "--verbose"],
            cwd=folder,
            env=environment(home, OUTBOX_SERVICE_BIND="127.0.0.1:0", PYTHONPATH=path, OUTBOX_DOTENV=os.devnull),
            stdout=output,
            stderr=subprocess.STDOUT,
            # What a shell starts in the background ignores SIGINT, and so do its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads here
        )
    try:
        yield Terminal(file, process), process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
        Stack(load(home, environment=False)).down()


def test_what_is_edited_or_killed_starts_again_and_what_fails_is_shown(home: Path, copied: Path) -> None:
    with terminal(home, copied) as (seen, process):
        seen.wait(r"stack +│ postgres: ready")
        seen.wait(r"dev +│ connector created")
        seen.wait(r"dev +│ the service is on http://127.0.0.1:\d+", r"sink-dedup +│ .*started")
        file = copied / SQL
        good = file.read_text()
        file.write_text(good.replace("[apply]", "[apply] nonsense ["))
        seen.wait(r"dev +│ sink-dedup: changed")
        seen.wait(r"sink-dedup +│ outbox: .*stock\.sql")
        seen.wait(r"dev +│ sink-dedup: ended — it starts again")
        file.write_text(good)
        seen.wait(r"dev +│ sink-dedup: changed")
        seen.wait(r"sink-dedup +│ .*started")
        service = copied / "stock" / "service.py"
        service.write_text(service.read_text() + "\n")
        seen.wait(r"dev +│ service: starting")
        seen.wait(r"dev +│ the service is on http://127.0.0.1:\d+")
        Stack(load(home, environment=False)).part("connect").kill()
        seen.wait(r"dev +│ connect: ended — it starts again")
        seen.wait(r"dev +│ connect: starting")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
    stack = Stack(load(home, environment=False))
    assert not any(stack.part(name).processes() for name in stack.parts)
