"""Commands that the soak runs: an expected failure has a code, and a traceback has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox_lab.soak import testbed
from outbox_lab.soak.testbed import Done
from outbox_lab.stack import interrupt


def run(home: Path, *words: str) -> Done:
    return testbed.run_command(load(home, environment=False), words)


def test_only_an_expected_failure_has_a_code(tmp_path: Path) -> None:
    done = run(tmp_path, "connect", "render")
    assert (done.status, done.code, bool(done.output)) == (0, "", True)
    done = run(tmp_path, "sink", "nothing")
    assert (done.status, done.code) == (1, "sink-unknown")
    assert "nothing" in done.end


def test_a_terminal_interrupts_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "CODED", "import os; print(os.getpgid(0))")
    assert int(run(tmp_path, "check").output) != os.getpgid(0)


def test_a_signal_that_ends_the_run_ends_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    monkeypatch.setattr(testbed, "CODED", f"open({str(started)!r}, 'w').write('x'); import time; time.sleep(600)")
    monkeypatch.setattr(testbed, "LOOK_S", 0.05)

    def require_none() -> None:
        if started.exists():
            raise Failure("the run was ended")

    monkeypatch.setattr(interrupt, "require_none", require_none)
    with pytest.raises(Failure, match="ended"):
        run(tmp_path, "check")


def test_a_traceback_has_no_code() -> None:
    assert not Done(1, "", "Traceback (most recent call last):\nKeyError: 1\n").code
