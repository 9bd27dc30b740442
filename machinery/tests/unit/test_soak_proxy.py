"""The proxy between two parts: what passes, and what does not while the link is broken."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from outbox.base.wait import wait_for
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import ports

TIMEOUT_S = 5


def serve(listener: socket.socket) -> None:
    """Send back what comes, on any number of connections."""

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1000):
                connection.sendall(data)

    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=echo, args=[connection], daemon=True).start()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of an echo."""
    listener = socket.create_server((ports.LOOPBACK, 0))
    threading.Thread(target=serve, args=[listener], daemon=True).start()
    made = Proxy("client-echo", listener.getsockname()[1])
    yield made
    made.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def client(proxy: Proxy) -> socket.socket:
    return socket.create_connection((ports.LOOPBACK, proxy.port), timeout=TIMEOUT_S)


def echoed(connection: socket.socket, text: bytes = b"hello") -> bytes:
    connection.sendall(text)
    return connection.recv(1000)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, gently or not."""
    try:
        return not connection.recv(1)
    except ConnectionError:
        return True


@pytest.fixture
def connection(proxy: Proxy) -> Iterator[socket.socket]:
    """A connection through the proxy, in use."""
    with closing(client(proxy)) as made:
        assert echoed(made) == b"hello"
        yield made


def test_bytes_pass_and_are_counted(proxy: Proxy, connection: socket.socket) -> None:
    assert proxy.connections == 1
    connection.close()
    wait_for("the connection to be closed", lambda: proxy.connections == 0, timeout_s=TIMEOUT_S)
    assert proxy.bytes == 2 * len(b"hello")


def test_a_cut_ends_connections_and_refuses_new_ones_until_healed(proxy: Proxy, connection: socket.socket) -> None:
    assert proxy.cut() == proxy.affected == 1
    assert is_closed(connection)
    with pytest.raises(ConnectionRefusedError):
        client(proxy)
    proxy.heal()
    with closing(client(proxy)) as another:
        assert echoed(another) == b"hello"


def test_a_half_open_link_lets_nothing_pass_and_loses_nothing(proxy: Proxy, connection: socket.socket) -> None:
    assert proxy.freeze() == 1
    assert proxy.affected == 0, "nothing has come through it since"
    connection.settimeout(0.2)
    connection.sendall(b"again")
    with pytest.raises(TimeoutError):
        connection.recv(1)
    assert proxy.affected == 1
    with closing(client(proxy)):  # it is accepted
        proxy.heal()
    connection.settimeout(TIMEOUT_S)
    assert connection.recv(1000) == b"again"


def test_a_slow_link_delays_what_passes_both_ways(proxy: Proxy, connection: socket.socket) -> None:
    proxy.delay(0.01)
    assert proxy.affected == 0
    assert echoed(connection) == b"hello"
    assert proxy.affected == 2


def test_requests_that_are_held_never_arrive_once_the_link_is_cut() -> None:
    with (
        closing(socket.create_server((ports.LOOPBACK, 0))) as listener,
        closing(Proxy("client-server", listener.getsockname()[1])) as proxy,
        closing(client(proxy)) as connection,
    ):
        server, _ = listener.accept()
        with closing(server):
            proxy.hold_requests()
            server.sendall(b"answer")
            assert connection.recv(1000) == b"answer"
            connection.sendall(b"late")
            wait_for("the request", lambda: proxy.affected == 1, timeout_s=TIMEOUT_S)
            proxy.cut()
            proxy.heal()
            assert is_closed(server)


def test_a_connection_that_is_made_during_a_cut_does_not_survive_it(proxy: Proxy) -> None:
    for _ in range(100):
        with closing(client(proxy)) as connection:
            proxy.cut()
            assert is_closed(connection)
            proxy.heal()


def test_it_ends_with_open_connections(proxy: Proxy) -> None:
    other = Proxy("client-echo", proxy.target_port)
    with closing(client(other)) as connection:
        echoed(connection)
        other.freeze()
        connection.sendall(b"held")
        other.close()
