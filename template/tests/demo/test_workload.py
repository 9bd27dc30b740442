"""The demo's requests, sent to the service in this process: each gets an expected answer and writes its events."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flask import Flask
from outbox.base.settings import Settings
from outbox.sink import discovery
from outbox_lab.testing.helpers import query
from outbox_lab.walkthrough import Request
from werkzeug.test import TestResponse

from demo.workload import ACCOUNTS, ACCOUNTS_MIN, Workload

PLANNED = 400


class Clients:
    """Sends requests one after the other, and counts the events that they write."""

    def __init__(self, app: Flask, settings: Settings) -> None:
        self._http = app.test_client()
        self._token = settings.service_token.get_secret_value()
        self.events = 0
        self.answered: Counter[str] = Counter()

    def send(self, request: Request) -> TestResponse:
        """Send a request, which gets one of the expected answers."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._token}"} if request.has_token else {}
        headers |= {"Idempotency-Key": str(uuid.uuid4())} if request.has_key else {}
        data = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
        response = self._http.open(request.path, method=request.method, data=data, headers=headers)
        assert response.status_code in request.expected, (request, response.text)
        is_success = response.status_code < 300
        self.events += request.events if is_success else 0
        self.answered[request.kind] += is_success
        return response

    def send_all(self, planned: Sequence[Request]) -> list[Any]:
        return [self.send(request).get_json() for request in planned]


def set_up(seed: int = 1) -> Workload:
    workload = Workload(seed)
    workload.set_up(lambda requests: [{"id": str(uuid.UUID(int=number))} for number in range(len(requests))])
    return workload


def test_each_request_is_answered_as_expected_and_writes_its_events(app: Flask, databases: Settings) -> None:
    clients, workload = Clients(app, databases), Workload(seed=7)
    workload.set_up(clients.send_all)
    assert set(clients.answered) == {"account", "funding", "freeze", "close"}
    for _ in range(PLANNED):
        clients.send(workload.plan())
    assert all(clients.answered[kind] > 5 for kind in ("account", "transfer", "freeze"))
    assert query(databases, "SELECT count(*) FROM outbox") == [(clients.events,)]


def test_the_same_seed_plans_the_same() -> None:
    def planned(seed: int) -> list[Request]:
        workload = set_up(seed)
        return [workload.plan() for _ in range(200)]

    assert planned(3) == planned(3) != planned(4)


def test_it_finds_a_request_for_hours() -> None:
    workload = set_up()
    kinds = Counter(workload.plan().kind for _ in range(100_000))
    assert kinds["freeze"] == ACCOUNTS - ACCOUNTS_MIN, "nobody has told it of other accounts"
    assert kinds["transfer"] > 90_000


def test_it_uses_the_accounts_that_were_opened() -> None:
    workload = set_up()
    used: set[object] = set()
    for number in range(2_000):
        request = workload.plan()
        if request.kind == "account":
            workload.answered(request, 409, {"title": "refused"})
            workload.answered(request, 201, {"id": f"new {number}"})
        if isinstance(request.body, dict):
            used.add(request.body.get("to_account"))
    assert any(str(account).startswith("new") for account in used)


def test_it_names_sinks_of_the_project(databases: Settings) -> None:
    assert {Workload.right, Workload.naive} <= set(discovery.sinks(databases))
