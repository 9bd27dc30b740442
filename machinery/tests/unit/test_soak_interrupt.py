"""The first signal ends a run, and no later one ends what stops its stack."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from outbox.soak.interrupt import SIGNALS

STOPS = """
import os, signal, subprocess, sys
from outbox.soak import interrupt

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


def said_after(name: str, ignored: str | None = None) -> str:
    """What a process says that gets this signal, and was started with another one ignored."""
    handlers = {one.name: "SIG_IGN" if one.name == ignored else "SIG_DFL" for one in SIGNALS}  # whatever ours are
    begin = "import signal" + "".join(f"; signal.signal(signal.{one}, signal.{how})" for one, how in handlers.items())
    return subprocess.check_output([sys.executable, "-c", begin + STOPS, name], text=True).strip()


@pytest.mark.parametrize("name", [one.name for one in SIGNALS])
def test_the_first_signal_ends_a_run_and_the_next_do_not_disturb_its_end(name: str) -> None:
    assert said_after(name) == f"stops everything {-signal.SIGTERM}", "what it starts meanwhile can be stopped"


def test_a_run_that_ignores_hangups_goes_on() -> None:
    assert said_after("SIGHUP", ignored="SIGHUP") == "goes on"
