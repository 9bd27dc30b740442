"""The service's gunicorn worker, with WSGI and ASGI: bounded time and size, and a slow client blocks no other."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path

import pytest
import requests

from outbox.base import project
from outbox.base.settings import Settings, address, load
from outbox.base.wait import timeout_scale, wait_for
from outbox.http.body import MAX_BYTES
from outbox.http.worker import CONNECTIONS, HEAD_MAX_BYTES
from outbox_lab.stack import ports
from outbox_lab.stack.command import Command
from tests.support.echo import PATH
from tests.support.paths import ROOT

TIMEOUT_S = 4.0
CLIENTS = 80
TOKEN = "secret"
BODY = json.dumps({"text": "hello"}).encode()
HEADERS = (
    f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
).encode()
WITH_LENGTH = HEADERS + b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKED = HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"
WHOLE = WITH_LENGTH + BODY
# Answers of some megabytes, more than a socket's buffers hold, for a client without a token.
PIPELINED = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 200

# What a slow client sends at once, and what it then sends at one byte a second.
SLOW = [
    (b"", b""),
    (HEADERS[:40], b""),
    (WITH_LENGTH + BODY[:8], b""),
    (CHUNKED + b"%x\r\n" % len(BODY) + BODY[:8], b""),
    (HEADERS[:1], HEADERS[1:]),
    (WITH_LENGTH, BODY),
]


@pytest.fixture(scope="module", params=["create_app", "create_async_app"], ids=["flask", "fastapi"])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Command]:
    """A service of a few routes, with one worker of two threads."""
    root: Path = tmp_path_factory.mktemp("project")
    (root / project.FILE).write_text(f'[tool.outbox]\nservice = "tests.support.echo:{request.param}"\n')
    settings = load(
        root / "home",
        environment=False,
        service_bind=f"127.0.0.1:{ports.choose(0)[0]}",
        service_token=TOKEN,
        service_workers=1,
        service_threads=2,
        service_request_timeout_s=TIMEOUT_S,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(project.VARIABLE, str(root))
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        process = Service(settings)
        process.start()
        try:
            yield process
        finally:
            process.stop()


class Service(Command):
    """`outbox serve`, ready when its process is."""

    def __init__(self, settings: Settings) -> None:
        self.address = address(settings.service_bind)
        self.url = settings.service_url
        super().__init__("service", settings, ["serve"])

    def is_ready(self) -> bool:
        with suppress(requests.RequestException):
            return requests.get(f"{self.url}/healthz", timeout=2).ok
        return False


@contextmanager
def watched(served: Service, within_s: float = 2) -> Iterator[None]:
    """A normal client sends one request after another, each on its own connection, and is served within a few
    seconds.
    """
    halt, statuses, slowest_s = threading.Event(), Counter[object](), 0.0

    def ask() -> None:
        nonlocal slowest_s
        headers = {"Authorization": f"Bearer {TOKEN}"}
        while not halt.wait(0.05):
            started_at_s = time.monotonic()
            try:
                response = requests.post(served.url + PATH, json={"text": "x"}, headers=headers, timeout=20)
                statuses[response.status_code] += 1
            except requests.RequestException as error:
                statuses[repr(error)] += 1
            slowest_s = max(slowest_s, time.monotonic() - started_at_s)

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(ask)
        try:
            yield
        finally:
            halt.set()
    watching.result()
    assert set(statuses) == {200}, statuses
    assert slowest_s < within_s * timeout_scale(), slowest_s


@contextmanager
def connected(served: Service, count: int, receive_bytes: int | None = None) -> Iterator[list[socket.socket]]:
    """Connections to the service, with a receive buffer of this size."""
    with ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(count)]
        for client in clients:
            if receive_bytes is not None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
            client.settimeout(15 * timeout_scale())
            client.connect(served.address)
        yield clients


def response(client: socket.socket) -> bytes:
    """Bytes that the service sends until it closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while data := client.recv(64 * 1024):
            received += data
    return received


def ask(served: Service, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """The response to a request that is sent in parts."""
    with connected(served, 1) as [client]:
        for part in parts:
            client.sendall(part)
            time.sleep(pause_s)
        client.shutdown(socket.SHUT_WR)
        return response(client)


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def drip(clients: list[tuple[socket.socket, bytes]]) -> None:
    """Send the rest of each client, one byte a second, while a connection is open."""
    for number in range(max(len(rest) for _, rest in clients)):
        time.sleep(1)
        sent = 0
        for client, rest in clients:
            with suppress(OSError):
                sent += client.send(rest[number : number + 1])
        if not sent:
            return


def have_ended(clients: list[socket.socket], read_bytes: int = 0) -> bool:
    """Whether the service has ended each connection. Before that, read so many bytes of each."""
    poll = select.poll()
    for client in clients:
        with suppress(OSError):
            client.recv(read_bytes, socket.MSG_DONTWAIT)
        poll.register(client, select.POLLRDHUP)
    return len(poll.poll(0)) == len(clients)


def test_slow_clients_get_408_and_block_nobody(served: Service) -> None:
    with watched(served), connected(served, CLIENTS) as clients:
        slow = list(zip(clients, cycle(SLOW), strict=False))
        for client, (begin, _) in slow:
            client.sendall(begin)
        threading.Thread(target=drip, args=[[(client, rest) for client, (_, rest) in slow]], daemon=True).start()
        answers = [(begin, response(client)) for client, (begin, _) in slow]
    assert {answer for begin, answer in answers if not begin} == {b""}, "who sends nothing is disconnected"
    assert {status(answer) for begin, answer in answers if begin} == {408}
    assert all(b"application/problem+json" in answer for begin, answer in answers if begin)


@pytest.mark.parametrize("read_bytes", [0, 1], ids=["nothing", "a byte a second"])
def test_clients_that_read_slowly_are_disconnected_and_block_nobody(served: Service, read_bytes: int) -> None:
    with watched(served, within_s=TIMEOUT_S), connected(served, CLIENTS, receive_bytes=1) as clients:
        for client in clients:
            client.sendall(PIPELINED)
        wait_for("their end", lambda: have_ended(clients, read_bytes), timeout_s=5 * TIMEOUT_S, poll_s=1)


def test_more_clients_than_a_worker_holds_block_nobody(served: Service) -> None:
    begins = [PIPELINED, *(begin for begin, _ in SLOW)]
    many = CONNECTIONS + 100
    with watched(served, within_s=TIMEOUT_S), connected(served, many, receive_bytes=1) as clients:
        for number, client in enumerate(clients):
            with suppress(OSError):  # one of the first is disconnected for one of the last
                client.sendall(begins[number % len(begins)])
        wait_for("their end", lambda: have_ended(clients), timeout_s=5 * TIMEOUT_S, poll_s=1)


@pytest.mark.parametrize(
    "request_", [WHOLE, CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)], ids=["length", "chunked"]
)
def test_a_slow_client_within_the_bound_is_served(served: Service, request_: bytes) -> None:
    size = -(-len(request_) // 5)
    parts = [request_[start : start + size] for start in range(0, len(request_), size)]
    answer = ask(served, *parts, pause_s=TIMEOUT_S / 2 / 5)
    assert status(answer) == 200, answer
    assert answer.endswith(b"hello")


def test_pipelined_requests_are_answered_in_order(served: Service) -> None:
    requests_ = [WHOLE.replace(b"hello", b"hell%d" % number) for number in range(5)]
    answer = ask(served, b"".join(requests_[:3]) + requests_[3][:30], requests_[3][30:] + requests_[4], pause_s=0.2)
    assert [b"hell%d" % number in answer for number in range(5)] == [True] * 5
    assert answer.count(b"HTTP/1.1 200") == 5


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (HEADERS + b"Content-Length: %d\r\n\r\n" % (MAX_BYTES + 1), 413),
        (CHUNKED + b"%x\r\n" % (MAX_BYTES + 1) + b" " * (MAX_BYTES + 1), 413),
        (CHUNKED + b"1\r\n \r\n" * (HEAD_MAX_BYTES + MAX_BYTES), 413),
        (HEADERS + b"A: b\r\n" * (HEAD_MAX_BYTES + MAX_BYTES), 431),
        (b"GET /" + b"x" * (HEAD_MAX_BYTES + MAX_BYTES), 414),
    ],
    ids=["length", "chunk", "small chunks", "headers", "line"],
)
def test_too_large_request_is_rejected_before_it_has_arrived(served: Service, request_: bytes, expected: int) -> None:
    with connected(served, 1) as [client]:
        client.sendall(request_)
        assert status(response(client)) == expected


@pytest.mark.parametrize(
    "request_",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        HEADERS + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        HEADERS + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEADERS + b"Content-Length: " + b"1" * 5000 + b"\r\n\r\n",
        CHUNKED + b"x\r\n",
    ],
)
def test_an_invalid_request_is_400_and_ends_the_connection(served: Service, request_: bytes) -> None:
    with connected(served, 1) as [client]:
        client.sendall(request_)
        assert status(response(client)) == 400


def test_a_client_that_expects_100_continue_gets_it_once(served: Service) -> None:
    with connected(served, 1) as [client]:
        client.sendall(WITH_LENGTH.replace(b"Host:", b"Connection: close\r\nExpect: 100-continue\r\nHost:"))
        assert client.recv(1024) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        answer = response(client)
    assert status(answer) == 200
    assert b"100 Continue" not in answer


@contextmanager
def stopping(served: Service) -> Iterator[None]:
    """The service is asked to stop before the block, has stopped after it, and starts again."""
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(served.stop)
        wait_for("it to stop", lambda: "Handling signal: term" in served.tail(), timeout_s=10)
        yield
        stopped.result()
    served.start()


@pytest.mark.parametrize("served", ["create_async_app"], ids=["fastapi"], indirect=True)
def test_a_background_task_runs_after_the_response_and_before_the_end(served: Service, tmp_path: Path) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    response = requests.post(served.url + "/later", json={"text": str(tmp_path)}, headers=headers, timeout=20)
    assert response.text == "soon"
    assert not (tmp_path / "to").exists()
    with stopping(served):
        (tmp_path / "from").touch()
    assert (tmp_path / "to").exists()


def test_a_stopping_service_waits_for_a_request_that_arrives(served: Service) -> None:
    with connected(served, 1) as [client]:
        client.sendall(WHOLE[:60])
        wait_for("the service to have accepted it", served.is_ready, timeout_s=10)
        with stopping(served):
            client.sendall(WHOLE[60:])
            assert status(response(client)) == 200
