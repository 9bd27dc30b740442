"""Ports of the embedded stack: chosen once, kept across restarts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from random import SystemRandom

import psutil

from outbox.base.errors import Failure
from outbox.base.heavy import requests
from outbox.base.wait import WaitTimeoutError, wait_for

LOOPBACK = "127.0.0.1"
RELEASE_TIMEOUT_S = 5.0
# Below the ports that outgoing connections take (Linux: from 32768, macOS: from 49152): one of them could have the port
# of a server that is not running.
OTHERS = range(10_000, 32_768)


@contextmanager
def reserved(*preferred: int) -> Iterator[list[int]]:
    """A port for each preferred one: the same if all are free, else other free ones; 0 prefers none. All differ.

    If one is taken, there is another stack on this machine, and its service may start later on its preferred port.
    Until the end nobody else reserves them, so that the servers of two stacks can start at once.
    """
    with ExitStack() as held:
        wanted = {port for port in preferred if port}
        if not all(_reserve(port, held) for port in wanted):
            held.close()
            wanted.clear()
        first = SystemRandom().randrange(len(OTHERS))
        others = chain(OTHERS[first:], OTHERS[:first])
        free = (port for port in others if port not in preferred and _reserve(port, held))
        chosen: list[int] = []
        for port in preferred:
            chosen.append(port if port in wanted and port not in chosen else next(free))
        yield chosen


def choose(*preferred: int) -> list[int]:
    """Ports that were free a moment ago, as ``reserved`` chooses them."""
    with reserved(*preferred) as chosen:
        return chosen


def _reserve(port: int, held: ExitStack) -> bool:
    """Reserve a free port; False if it is taken.

    What is reserved is the UDP port of the same number. The server can listen on the TCP port meanwhile, and a command
    that is killed has released it.
    """
    reservation = socket.socket(type=socket.SOCK_DGRAM)
    try:
        reservation.bind((LOOPBACK, port))
    except OSError:
        reservation.close()
        return False
    held.enter_context(reservation)
    return is_free(port)


def is_free(port: int) -> bool:
    """Whether a server can listen on this port of the loopback interface now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def require_free(port: int, what: str) -> None:
    """Check that no other program listens on our port. Raises Failure if one does.

    Waits a moment first: a killed process with many threads looks dead before its last thread releases the port.
    """
    try:
        wait_for(f"port {port} of {what} to be free", lambda: is_free(port), timeout_s=RELEASE_TIMEOUT_S)
    except WaitTimeoutError:
        raise Failure(
            f"port {port} of {what} is taken by another program",
            f"end that program (`ss -ltnp 'sport = :{port}'` shows it), or `outbox reset` to choose other ports",
            code="port-taken",
        ) from None


def listens(process: psutil.Process, port: int) -> bool:
    """Whether it is this process that listens on a port."""
    with suppress(psutil.Error):
        connections = process.net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)
    return False


def is_open(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0


def answers(url: str, login: tuple[str, str] | None = None) -> bool:
    """Whether a GET of this URL succeeds."""
    try:
        return requests.get(url, timeout=2, auth=login).ok
    except requests.RequestException:
        return False
