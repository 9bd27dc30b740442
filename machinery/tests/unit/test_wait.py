"""Waiting for a condition, with a deadline; and calls in threads, in which a plain sink applies and calls handlers."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from outbox.base import wait
from outbox.base.errors import Failure
from outbox.base.wait import timeout_scale, wait_for
from outbox_lab.testing.failures import raises

PROGRAM = f"""
import time
from {wait.__name__} import in_thread

in_thread("apply", time.sleep, 3600)
try:
    in_thread("apply", exit, 3).result()
except SystemExit as error:
    print("seen", error)
"""


def test_the_first_true_answer_is_returned() -> None:
    answers = iter([None, "", 0, "here"])
    assert wait_for("an answer", lambda: next(answers), timeout_s=5, poll_s=0) == "here"
    assert list(answers) == []


@pytest.mark.parametrize("scale", [1, 3])
def test_it_ends_at_the_scaled_deadline_and_says_what_it_waited_for(
    monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    monkeypatch.setenv("OUTBOX_TIMEOUT_SCALE", str(scale))
    started_at = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        wait_for("the cows to come home", lambda: [], timeout_s=0.1, poll_s=0.01)
    assert 0.1 * scale <= time.monotonic() - started_at < 2
    assert isinstance(caught.value, Failure)
    assert "the cows to come home" in str(caught.value)
    assert "the last answer was []" in str(caught.value)


def test_an_exception_of_the_condition_ends_the_wait_at_once() -> None:
    answers = iter([None])
    with pytest.raises(StopIteration):
        wait_for("nothing", lambda: next(answers), timeout_s=5)


def test_a_need_that_is_gone_ends_the_wait_at_once() -> None:
    def gone() -> None:
        raise Failure("it has ended", code="process-ended")

    with raises("process-ended"):
        wait_for("nothing", lambda: False, timeout_s=60, needs=gone)
    assert wait_for("the truth", lambda: True, timeout_s=60, needs=gone)


@pytest.mark.parametrize("wrong", ["fast", "0", "-1", "nan"])
def test_a_wrong_multiplier_is_a_failure_that_names_the_variable(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("OUTBOX_TIMEOUT_SCALE", wrong)
    with pytest.raises(Failure, match="OUTBOX_TIMEOUT_SCALE"):
        timeout_scale()


def test_a_call_that_never_returns_does_not_keep_the_process_and_any_exception_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "seen 3\n"), done.stderr
