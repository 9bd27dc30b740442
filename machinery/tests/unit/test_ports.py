"""Ports of the embedded stack."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from outbox_lab.stack import ports
from outbox_lab.testing.failures import raises


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as server:
        server.bind((ports.LOOPBACK, 0))
        server.listen()
        yield server.getsockname()[1]


def test_preferred_ports_are_chosen_unless_another_stack_has_one_of_them(taken: int) -> None:
    [free] = ports.choose(0)
    assert (ports.is_free(free), ports.is_open(free)) == (True, False)
    assert (ports.is_free(taken), ports.is_open(taken)) == (False, True)
    assert ports.choose(free) == [free]
    chosen = ports.choose(taken, free)
    assert not set(chosen) & {taken, free}
    assert all(map(ports.is_free, chosen))


def test_reserved_port_is_not_chosen_before_its_server_listens() -> None:
    [free] = ports.choose(0)
    with ports.reserved(free) as first, ports.reserved(free, 0) as others:
        assert first == [free]
        assert free not in others
        with socket.create_server((ports.LOOPBACK, free)):
            assert ports.is_open(free)
    assert ports.choose(free) == [free]


def test_no_outgoing_connection_takes_a_chosen_port() -> None:
    with suppress(FileNotFoundError):  # Linux has it
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert max(ports.choose(*[0] * 100)) < lowest


def test_a_taken_port_is_a_failure_that_names_the_port_and_the_part(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "RELEASE_TIMEOUT_S", 0.2)
    with raises("port-taken", f"port {taken} of the broker", f"sport = :{taken}"):
        ports.require_free(taken, "the broker")


def test_a_port_in_time_wait_counts_as_free() -> None:
    # A stopped server leaves connections in TIME_WAIT for a minute; a restart must not fail because of them.
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((ports.LOOPBACK, 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection((ports.LOOPBACK, port))
        accepted, _ = server.accept()
        accepted.close()  # the server's end closes first, so that it is the one in TIME_WAIT
        client.recv(1)
        client.close()
    ports.require_free(port, "it")
