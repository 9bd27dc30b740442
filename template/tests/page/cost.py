"""What the page costs: `python -m template.tests.page.cost`.

On a real chain under steady transfers it measures processor seconds of the demo's process, which serves the page, and
of all other processes of the chain, which answer its questions: with no open tab, with one, and with fifty. While
nobody looks the page reads nothing, so that no tab is the demo without the page. Processor time depends on the machine:
compare the ratios.
"""

from __future__ import annotations

import http.client
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from outbox.base.settings import Settings, load
from outbox_lab.stack import command
from outbox_lab.stack.stack import PARTS, Stack

from demo.page.client import Client
from template.tests.page import real
from template.tests.page.made_up import NAIVE, RIGHT

TABS = (0, 1, 50)
ROUNDS = 2
WINDOW_S = 20.0
REST_S = 3.0  # before a window: tabs have opened, or the reading that was under way has ended
PERIOD_S = 0.2  # between two transfers


@dataclass
class Used:
    """Processor seconds, of how many seconds."""

    page_s: float = 0.0
    chain_s: float = 0.0
    of_s: float = 0.0

    def line(self, tabs: int, first: Used) -> str:
        """A row of the table. The share is that of the chain's processor time with no tab."""
        page, chain, base = self.page_s / self.of_s, self.chain_s / self.of_s, first.chain_s / first.of_s
        return f"{tabs:5} {page:18.1%} {chain:12.1%} {page / base:22.1%}"


def main() -> None:
    """Measure, and print a table."""
    with tempfile.TemporaryDirectory() as folder, real.served(real.COMMAND, Path(folder) / "log") as demo:
        demo.wait_ready()
        settings = load(real.HOME, environment=False)
        page, used = psutil.Process(demo.process.pid), {tabs: Used() for tabs in TABS}
        with transfers(settings):
            for _ in range(ROUNDS):
                for tabs in TABS:
                    with opened(demo.url, tabs):
                        time.sleep(REST_S)
                        measure(page, settings, used[tabs])
    print(" tabs  the demo's process    the chain   page, of the chain's")  # noqa: T201
    for tabs, one in used.items():
        print(one.line(tabs, used[0]))  # noqa: T201
    fifty, one_tab = used[50].page_s / used[50].of_s, used[1].page_s / used[1].of_s
    print(f"50 tabs : 1 tab = {fifty / one_tab:.2f}")  # noqa: T201


def measure(page: psutil.Process, settings: Settings, into: Used) -> None:
    """Add a window."""
    began, page_s, chain_s = time.monotonic(), cpu_s([page]), cpu_s(chain(settings))
    time.sleep(WINDOW_S)
    into.page_s += cpu_s([page]) - page_s
    into.chain_s += cpu_s(chain(settings)) - chain_s
    into.of_s += time.monotonic() - began


def chain(settings: Settings) -> Iterator[psutil.Process]:
    """Every process of the chain."""
    stack = Stack(settings)
    for part in (
        *(stack.part(name) for name in PARTS),
        command.service(settings),
        command.sink(settings, RIGHT, NAIVE),
    ):
        yield from part.processes()


def cpu_s(processes: Iterator[psutil.Process] | list[psutil.Process]) -> float:
    """Their processor time, and that of their children that have ended."""
    return sum(sum(process.cpu_times()[:4]) for process in processes)


@contextmanager
def transfers(settings: Settings) -> Iterator[None]:
    """Steady transfers."""
    ended, client = threading.Event(), Client(settings)

    def send() -> None:
        while not ended.wait(PERIOD_S):
            client.transfer()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def opened(url: str, tabs: int) -> Iterator[None]:
    """So many streams, each read to its end. A browser opens one for all its tabs: these are the tabs of many."""
    address = urlsplit(url)
    headers = {"Authorization": f"Bearer {address.fragment.removeprefix('token=')}"}
    connections, threads = [], []
    for _ in range(tabs):
        connection = http.client.HTTPConnection(address.netloc)
        connection.request("GET", "/api/stream", headers=headers)
        stream = connection.getresponse()
        if stream.status != http.HTTPStatus.OK:
            sys.exit(f"cost: the stream answered {stream.status}")
        threads.append(threading.Thread(target=_drain, args=[stream], daemon=True))
        threads[-1].start()
        connections.append((connection, stream))
    try:
        yield
    finally:
        for connection, _stream in connections:
            if connection.sock is not None:
                connection.sock.shutdown(2)
            connection.close()


def _drain(stream: http.client.HTTPResponse) -> None:
    while stream.read1(65_536):
        pass


if __name__ == "__main__":
    main()
