"""Ports of the embedded stack: chosen once, kept across restarts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from random import SystemRandom

from outbox.base.errors import Failure
from outbox.base.wait import WaitTimeoutError, wait_for

LOOPBACK = "127.0.0.1"
RELEASE_TIMEOUT_S = 5.0
# Below the ports that outgoing connections take (Linux: from 32768, macOS: from 49152): one of them could have the port
# of a server that is not running.
OTHERS = range(10_000, 32_768)


def choose(*preferred: int) -> list[int]:
    """A port for each preferred one: the same if all are free, else other free ones; 0 prefers none. All differ.

    If one is taken, there is another stack on this machine, and its service may start later on its preferred port.
    """
    are_free = all(port == 0 or is_free(port) for port in preferred)
    others = _others()
    chosen: list[int] = []
    for port in preferred:
        is_wanted = are_free and port != 0 and port not in chosen
        chosen.append(port if is_wanted else next(other for other in others if other not in (*chosen, *preferred)))
    return chosen


def _others() -> Iterator[int]:
    """Free ports in random order, so that two stacks that start at once choose different ones."""
    yield from filter(is_free, SystemRandom().sample(OTHERS, len(OTHERS)))


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


def is_open(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((LOOPBACK, port)) == 0
