"""The walkthrough's clients: what they send, repeat, count, and report as unexpected."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import requests

from outbox.base.settings import load
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough.traffic import Traffic
from outbox_lab.walkthrough.workload import Request

Answer = int | Exception


class Service:
    """Answers in place of the service: each path with its list of statuses, the last one for ever."""

    def __init__(self, **answers: list[Answer]) -> None:
        self._answers = answers
        self.not_json: set[str] = set()
        self.received: list[tuple[str, dict[str, str], bytes | None]] = []

    def request(self, method: str, url: str, *, data: bytes | None, headers: dict[str, str], timeout: float) -> Any:
        """As `requests.Session.request`."""
        assert timeout > 0
        path = url.rpartition("/")[2]
        self.received.append((f"{method} {path}", headers, data))
        answers = self._answers[path]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        response = requests.Response()
        response.status_code = answer
        response._content = b"<html>" if path in self.not_json else json.dumps({"ok": True}).encode()
        return response


class Fixed:
    """A workload that sets up with the first request, and then plans all of them in turn."""

    right = "dedup"
    naive: str | None = None

    def __init__(self, *planned: Request) -> None:
        self._planned = planned
        self._count = 0
        self.read: list[Any] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        self.read = send(self._planned[:1])

    def plan(self) -> Request:
        self._count += 1
        return self._planned[(self._count - 1) % len(self._planned)]


def traffic(service: Service, workload: Fixed, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(Traffic, "session", lambda _: service)
    return Traffic(load(Path("/nonexistent"), environment=False, service_token="secret"), workload)


def test_request_is_repeated_with_its_key_until_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(orders=[503, requests.ConnectionError(), requests.Timeout(), 201])
    clients = traffic(service, Fixed(Request("order", "/orders", {}, (201,), events=3)), monkeypatch)
    clients.run(1)
    assert len(service.received) == 4
    assert len({headers["Idempotency-Key"] for _, headers, _ in service.received}) == 1
    assert (clients.answered, clients.events, clients.surprises) == (Counter(order=1), 3, [])


def test_each_request_has_its_key_and_only_successful_ones_have_written_events(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = (
        Request("order", "/orders", {}, (201, 409), events=2),
        Request("order", "/full", {}, (201, 409), events=2),
        Request("invalid", "/strict", {}, (422,)),
    )
    service = Service(orders=[201], full=[409], strict=[422, 201])
    clients = traffic(service, Fixed(*planned), monkeypatch)
    clients.run(6)
    assert clients.answered == {"order": 2, "order refused": 2, "invalid": 2}
    assert (clients.events, clients.surprises) == (4, ['invalid got 201: {"ok": true}'])
    assert len({headers["Idempotency-Key"] for _, headers, _ in service.received}) == 6


def test_a_request_is_sent_as_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = (
        Request("order", "/orders", {"pieces": 1}, (201,), method="PUT"),
        Request("not JSON", "/raw", b"{", (400,), has_key=False),
        Request("no token", "/closed", [], (401,), has_token=False),
        Request("page", "/page", None, (200,), method="GET", has_key=False),
    )
    service = Service(orders=[201], raw=[400], closed=[401], page=[200])
    traffic(service, Fixed(*planned), monkeypatch).run(4)
    sent = {name: (set(headers), data) for name, headers, data in service.received}
    assert sent == {
        "PUT orders": ({"Content-Type", "Authorization", "Idempotency-Key"}, b'{"pieces": 1}'),
        "POST raw": ({"Content-Type", "Authorization"}, b"{"),
        "POST closed": ({"Content-Type", "Idempotency-Key"}, b"[]"),
        "GET page": ({"Content-Type", "Authorization"}, None),
    }
    assert {headers.get("Authorization") for _, headers, _ in service.received} == {"Bearer secret", None}


def test_set_up_fails_at_an_unexpected_response(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Fixed(Request("shelf", "/shelves", {}, (201,), events=1))
    clients = traffic(Service(shelves=[201, 500]), workload, monkeypatch)
    clients.set_up()
    assert (workload.read, clients.events) == ([{"ok": True}], 1)
    with raises("failed", "shelf got 500"):
        clients.set_up()


class Listening(Fixed):
    """A workload that keeps the answers to what it planned."""

    def __init__(self, *planned: Request) -> None:
        super().__init__(*planned)
        self.answers: list[tuple[str, int, Any]] = []

    def answered(self, request: Request, status: int, body: Any) -> None:
        self.answers.append((request.kind, status, body))


def test_a_workload_sees_the_answers_if_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Listening(
        Request("order", "/orders", {}, (201,)), Request("page", "/page", {}, (200,), method="GET", has_key=False)
    )
    service = Service(orders=[201], page=[200])
    service.not_json = {"page"}
    clients = traffic(service, workload, monkeypatch)
    clients.set_up()
    assert workload.answers == [], "set_up reads its own"
    clients.run(2)
    assert sorted(workload.answers, key=str) == [("order", 201, {"ok": True}), ("page", 200, None)]


def test_a_workload_that_stops_writing_events_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Request("order", "/orders", {}, (201, 409), events=1)
    clients = traffic(Service(orders=[201, 201, 409]), Fixed(planned), monkeypatch)
    clients.require_events(3)  # nothing has been sent yet
    clients.start(20)()
    clients.require_events(2)
    with raises("workload-idle", "plan()", "2", "3", "demo/workload.py"):
        clients.require_events(3)


def test_what_plan_raises_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = traffic(Service(orders=[201]), Fixed(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        clients.start(1)()
    with pytest.raises(ZeroDivisionError):
        clients.require_events(1)
