"""A trace id leads from a request to its events on the topic."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

from outbox.base.settings import Settings
from outbox_lab.stack.command import Command, service
from tests.support.topic_reader import relayed

PARENT_ID = "00f067aa0ba902b7"


@contextmanager
def serving(settings: Settings) -> Iterator[Command]:
    """The service as a process, and surely no longer than the block."""
    process = service(settings)
    process.start()
    try:
        yield process
    finally:
        process.stop()


class Caller:
    """A client of the service that sends a traceparent with its requests."""

    def __init__(self, settings: Settings) -> None:
        self._url = f"http://{settings.service_host}:{settings.service_port}"
        self._authorization = {"Authorization": f"Bearer {settings.service_token.get_secret_value()}"}

    def post(self, path: str, body: dict[str, Any], traceparent: str | None = None) -> requests.Response:
        headers = {**self._authorization, "Idempotency-Key": str(uuid.uuid4()), "traceparent": traceparent}
        return requests.post(self._url + path, json=body, headers=headers, timeout=30)


def lines(log: str, trace_id: str) -> list[dict[str, Any]]:
    """Log lines of a trace, parsed."""
    return [json.loads(line) for line in log.splitlines() if trace_id in line]


def test_a_trace_id_leads_from_the_request_to_its_events(chain: Settings) -> None:
    sampled, unsampled, refused = (uuid.uuid4().hex for _ in range(3))
    with serving(chain) as process:
        caller = Caller(chain)
        movement = {"item_id": str(uuid.uuid4()), "quantity": 7, "unit": "KGM"}
        made = caller.post("/movements", movement, f"00-{sampled}-{PARENT_ID}-01")
        caller.post("/movements", movement, f"00-{unsampled}-{PARENT_ID}-00")
        caller.post("/movements", movement)
        caller.post("/movements", {**movement, "quantity": 0}, f"00-{refused}-{PARENT_ID}-01")
        log = process.log_file.read_text()
    (answered,) = lines(log, sampled)
    assert (answered["event"], answered["status"]) == ("request completed", 201)
    assert (answered["path"], answered["trace_id"]) == ("/movements", sampled)
    assert [line["status"] for line in lines(log, refused)] == [422]
    assert lines(log, unsampled) == []
    records = relayed(chain)
    assert len(records) == 3
    of_trace = [record for record in records if sampled in (record.headers["traceparent"] or "")]
    assert [json.loads(record.value)["movement_id"] for record in of_trace] == [made.json()["id"]]
