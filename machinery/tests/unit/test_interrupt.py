"""The first Ctrl-C ends only the faults. Any other signal ends the run, and nothing disturbs the stop of its stack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outbox.base.wait import wait_for
from outbox_lab.stack.interrupt import SIGNALS

STOPS = """
import os, signal, subprocess, sys
from outbox_lab.stack import interrupt

def send(name):
    os.kill(os.getpid(), getattr(signal, name))

interrupt.once()
try:
    send(sys.argv[1])
    print("goes on")
except KeyboardInterrupt:
    for one in interrupt.SIGNALS:
        os.kill(os.getpid(), one)
    started = subprocess.run([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
    print("stops everything", started.returncode)
"""


HANDLED = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whatever ours is


def said_after(name: str, ignored: str | None = None) -> str:
    """Output of a process that gets a signal, started with another signal ignored."""
    handlers = {one.name: "SIG_IGN" if one.name == ignored else "SIG_DFL" for one in SIGNALS}  # whatever ours are
    begin = "import signal" + "".join(f"; signal.signal(signal.{one}, signal.{how})" for one, how in handlers.items())
    return subprocess.check_output([sys.executable, "-c", begin + STOPS, name], text=True).strip()


@pytest.mark.parametrize("name", [one.name for one in SIGNALS])
def test_first_signal_ends_a_run_and_later_ones_are_ignored(name: str) -> None:
    assert said_after(name) == f"stops everything {-signal.SIGTERM}", "what it starts meanwhile can be stopped"


HANGS_UP = """
import fcntl, signal, sys, termios
from pathlib import Path
from outbox_lab.stack import interrupt

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ours may be ignored, as after nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # whose end is a SIGHUP
interrupt.once()
try:
    print("runs", flush=True)
    Path(sys.argv[2]).touch()  # not within the write any more, which the end of the terminal would fail
    signal.pause()
except KeyboardInterrupt:
    print("stops", flush=True)
    Path(sys.argv[1]).write_text("stopped everything")
"""


def test_a_command_whose_terminal_is_gone_stops_everything(tmp_path: Path) -> None:
    """Its output raises no error meanwhile."""
    ours, its = os.openpty()
    command = [sys.executable, "-c", HANGS_UP, str(tmp_path / "said"), str(tmp_path / "waits")]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.PIPE, start_new_session=True) as process:
        os.close(its)
        assert os.read(ours, 100).startswith(b"runs")
        wait_for("the command to wait", (tmp_path / "waits").exists, timeout_s=60)
        os.close(ours)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert (tmp_path / "said").read_text() == "stopped everything"


def test_a_run_that_ignores_hangups_goes_on() -> None:
    assert said_after("SIGHUP", ignored="SIGHUP") == "goes on"


WAITS = """
import threading
from outbox.base.errors import Failure
from outbox_lab.stack import interrupt
from outbox_lab.soak.fault import wait_or_not_fired

interrupt.once()
codes = []

def wait():
    try:
        wait_or_not_fired("what never comes", lambda: waits.set(), timeout_s=600)
    except Failure as failure:
        codes.append(failure.code)

waits = threading.Event()
thread = threading.Thread(target=wait)
thread.start()
waits.wait()
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    thread.join()
    print(codes)
"""


def test_a_signal_ends_the_waits_of_faults_too() -> None:
    said = subprocess.check_output([sys.executable, "-c", f"import signal\n{WAITS}"], text=True, timeout=300)
    assert said.strip() == "['interrupted']"


ENDS_EARLY = """
import signal, sys
from outbox_lab.stack import interrupt

interrupt.once()
said = []
try:
    with interrupt.asked_to_end(lambda: said.append("ends early")):
        for name in sys.argv[2:]:
            signal.raise_signal(getattr(signal, name))
    signal.raise_signal(getattr(signal, sys.argv[1]))
except KeyboardInterrupt:
    said.append("stops")
print(*said)
"""


@pytest.mark.parametrize(
    ("within", "after", "said"),
    [
        ([], "SIGINT", "stops"),
        (["SIGINT"], "SIGINT", "ends early stops"),
        (["SIGINT", "SIGINT"], "SIGCHLD", "ends early stops"),
        (["SIGTERM"], "SIGINT", "stops"),
        (["SIGHUP"], "SIGINT", "stops"),
    ],
)
def test_the_first_ctrl_c_ends_the_faults_and_a_second_one_the_run(within: list[str], after: str, said: str) -> None:
    command = [sys.executable, "-c", f"{HANDLED}{ENDS_EARLY}", after, *within]
    assert subprocess.check_output(command, text=True, timeout=300).strip() == said


def test_a_run_that_ignores_ctrl_c_is_not_ended_by_it() -> None:
    command = [sys.executable, "-c", f"{HANDLED}signal.signal(signal.SIGINT, signal.SIG_IGN)\n{ENDS_EARLY}"]
    assert not subprocess.check_output([*command, "SIGINT", "SIGINT"], text=True, timeout=300).strip()
