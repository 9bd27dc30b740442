"""The page on a real chain, after the start of it and without the lesson: `python -m template.tests.page.real`.

It prints the address, then that it is ready, and does what the page asks for until it is terminated. The stack is new,
in a home folder of its own, which is deleted at the end.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from outbox.base import project
from outbox.base.settings import load
from outbox.base.wait import wait_for
from outbox.sink import discovery
from outbox_lab.stack.stack import Stack
from outbox_lab.walkthrough import Step, Story, workload
from outbox_lab.walkthrough.chain import Processes
from outbox_lab.walkthrough.story import watched

from demo.page.player import PagePlayer

T = TypeVar("T")
COMMAND = ("-m", "template.tests.page.real")
HOME = project.current().home / "page"
SEED = 7
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/#\S+")
READY = "The page is yours."
START_S = 300.0
STOP_S = 120.0


class Start(Story):
    """The story's first step."""

    @property
    def steps(self) -> list[Step]:
        return super().steps[:1]


class Served:
    """A command that serves the page, in a process of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT)
        self.url = self._wait("the address", lambda: ADDRESS.search(self.said())).group()

    def said(self) -> str:
        """The output so far."""
        return self._log.read_text()

    def wait_ready(self) -> None:
        """Wait until the chain has started."""
        self._wait("the chain to start", lambda: READY in self.said() or None)

    def stop(self) -> None:
        """Let it stop what it started."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_S)

    def _wait(self, what: str, condition: Callable[[], T | None]) -> T:
        def needs() -> None:
            if self.process.poll() is not None:
                raise AssertionError(self.said()[-3_000:])

        return wait_for(what, condition, timeout_s=START_S, needs=needs)


@contextmanager
def served(command: Sequence[str], log: Path) -> Iterator[Served]:
    """Run a command that serves the page."""
    one = Served(command, log)
    try:
        yield one
    finally:
        one.stop()


def main() -> None:
    """Start the chain, and wait for the page."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    project.make_importable()
    if HOME.exists():
        Stack(load(HOME, environment=False)).reset()
    settings = load(HOME, environment=False)
    planned = workload.load(SEED)
    player = PagePlayer()
    story = Start(Processes(settings, watched(discovery.sinks(settings), planned)), planned, player.screen)
    try:
        player.play(story)
        player.screen.say(READY)
        player.wait()
    except KeyboardInterrupt:
        player.screen.say("")
    finally:
        for one in (signal.SIGTERM, signal.SIGINT):  # a second one must not leave half of it running
            signal.signal(one, signal.SIG_IGN)
        player.close()
        story.tear_down()
        shutil.rmtree(HOME)


if __name__ == "__main__":
    main()
