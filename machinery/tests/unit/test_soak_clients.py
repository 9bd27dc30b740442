"""The clients of the soak, against a service that is a few lines of HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.wait import wait_for
from outbox_lab.soak import Request, clients, history
from outbox_lab.soak.clients import Clients
from outbox_lab.soak.history import SET_UP, History, Recorder


class Service(BaseHTTPRequestHandler):
    """Answers each request with its body. It refuses a key that had another body."""

    bodies: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_same = self.bodies.setdefault(self.headers["Idempotency-Key"], body) == body
        self.send_response(201 if is_same else 409)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class Orders:
    """Orders, each of another number of pieces."""

    def __init__(self, ends_after: int = 10**6) -> None:
        self.ends_after = ends_after
        self.count = 0
        self.answers: list[Any] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        send([Request("order", "/orders", {"pieces": 0}, (201,))])

    def plan(self) -> Request:
        self.count += 1
        if self.count > self.ends_after:
            raise ValueError("no order is left")
        return Request("order", "/orders", {"pieces": self.count}, (201,))

    def answered(self, request: Request, status: int, body: Any) -> None:
        assert (status, body) == (201, request.body)
        self.answers.append(body)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """The settings of a client of the service, which runs."""
    handler = type("Handler", (Service,), {"bodies": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        given = load(tmp_path, environment=False)
        yield given.replace(service_bind=f"127.0.0.1:{server.server_port}")
        server.shutdown()


def sent(settings: Settings, domain: Any, file: Path, until: Callable[[], bool]) -> History:
    """The history of clients that send until something is so, or one of them ends."""
    recorder = Recorder(file)
    try:
        one = Clients(settings, domain, recorder, rate=2_000, seed=1)
        one.set_up()
        with one.sending():
            wait_for("the clients", until, timeout_s=60, needs=one.require_running)
    finally:
        recorder.close()
    with file.open() as lines:
        return history.read(lines)


def test_what_the_set_up_sends_is_told_apart(settings: Settings, tmp_path: Path) -> None:
    domain = Orders()
    found = sent(settings, domain, tmp_path / "history.jsonl", lambda: domain.count > 20)
    assert [one.body for one in found.attempts if one.client == SET_UP] == [{"pieces": 0}]
    assert len(found.attempts) > 20


def test_a_client_that_ends_ends_the_run(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(Failure) as raised:
        sent(settings, Orders(ends_after=20), tmp_path / "history.jsonl", lambda: False)
    assert raised.value.code == "soak-client-ended"


def test_clients_go_on_until_there_are_answers_or_for_a_while(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ANSWERED_TIMEOUT_S", 60.0)
    recorder = Recorder(tmp_path / "history.jsonl")
    one = Clients(settings, Orders(), recorder, rate=2_000, seed=1)  # type: ignore[arg-type]
    with one.sending():
        before = recorder.acknowledged
        one.wait_answered()
        assert recorder.acknowledged > before
    monkeypatch.setattr(clients, "ANSWERED_TIMEOUT_S", 0.01)
    one.wait_answered()
    recorder.close()


def test_old_keys_are_reused_for_the_same_and_another_request(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "REUSED", 1.0)
    monkeypatch.setattr(clients, "REPEATED", 0.0)
    domain = Orders()
    found = sent(settings, domain, tmp_path / "history.jsonl", lambda: domain.count > 60)
    again = [one for operation in found.operations.values() for one in operation.attempts[1:]]
    assert len(again) > 10
    assert {one.status for one in again} == {201}
    assert found.misuses
    assert {one.status for one in found.misuses} == {409}
    assert len(domain.answers) >= 60, "the domain hears of what it has planned"
