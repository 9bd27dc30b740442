"""An interrupted test run leaves no process of its stack behind. The details are in unit/test_homes.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from outbox.base.wait import wait_for
from outbox_lab.testing import homes
from outbox_lab.testing.homes import leftovers
from tests.endless import STARTED
from tests.support.paths import ROOT


@contextmanager
def run(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A test run in the middle of a test, and the home of its stack."""
    started = folder / "started"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "tests/endless.py"],
        cwd=ROOT,
        env={**os.environ, STARTED: str(started), homes.VARIABLE: str(folder / "homes")},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        # What a shell starts in the background ignores SIGINT, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads here
    )

    def home() -> str:
        assert process.poll() is None
        return started.read_text() if started.exists() else ""

    try:
        yield process, Path(wait_for("the stack of the run", home, timeout_s=120, poll_s=0.1))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        homes.sweep(folder / "homes")


@pytest.mark.parametrize(
    ("how", "options"),
    [(signal.SIGINT, ["-n", "1"]), (signal.SIGKILL, ["-p", "no:xdist"])],
    ids=["interrupted with xdist", "killed"],
)
def test_the_stack_of_an_interrupted_run_ends(how: signal.Signals, options: list[str], tmp_path: Path) -> None:
    with run(tmp_path, *options) as (process, home):
        assert leftovers(home)
        process.send_signal(how)
        wait_for("every process to end", lambda: not leftovers(home), timeout_s=60, poll_s=0.2)
