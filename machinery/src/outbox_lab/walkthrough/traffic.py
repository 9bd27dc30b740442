"""The clients: they send what the project's workload plans, and count the responses."""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from outbox.base.errors import Failure
from outbox.base.heavy import requests
from outbox.base.settings import Settings
from outbox.base.wait import nothing, wait_for
from outbox_lab.walkthrough.workload import Listener, Request, Workload

CLIENTS = 4
TIMEOUT_S = 30.0
RETRY_TIMEOUT_S = 60.0


class Service:
    """The service, as its clients reach it."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.service_url
        self._token = settings.service_token.get_secret_value()

    def send(self, session: requests.Session, request: Request, key: str | None, timeout_s: float) -> requests.Response:
        """Send a request once, with this Idempotency-Key. Raises RequestException without a response."""
        headers = {"Content-Type": "application/json"}
        if request.has_token:
            headers["Authorization"] = f"Bearer {self._token}"
        if key is not None:
            headers["Idempotency-Key"] = key
        data = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
        return session.request(
            request.method,
            self._url + request.path,
            data=None if request.method == "GET" else data,
            headers=headers,
            timeout=timeout_s,
        )


def key_of(request: Request) -> str | None:
    """A new Idempotency-Key for a request; None if it is sent without one."""
    return str(uuid.uuid4()) if request.has_key else None


def json_of(response: requests.Response) -> Any:
    """The JSON of a response; None if it is not JSON."""
    try:
        return response.json()
    except ValueError:
        return None


class Traffic:
    """Sends planned requests by several clients, which decide the order in which the service receives them."""

    def __init__(self, settings: Settings, workload: Workload, needs: Callable[[], None] = nothing) -> None:
        """``needs`` raises if the service has ended, so that nobody waits for its response."""
        self._needs = needs
        self._service = Service(settings)
        self._workload = workload
        self._sessions = threading.local()
        self._stopped = threading.Event()
        self._one_at_a_time = threading.Lock()  # calls of the workload, and the counts
        self._background: Future[int] = Future()
        self.answered: Counter[str] = Counter()  # responses by kind of request
        self.surprises: list[str] = []  # unexpected responses
        self.events = 0  # that the successful requests have written

    def set_up(self) -> None:
        """Let the workload create its entities. Raises Failure if a response is not the expected one."""
        self._workload.set_up(self._send_and_read)

    def run(self, count: int) -> None:
        """Send this many requests, and return when all have a response."""
        with ThreadPoolExecutor(CLIENTS) as clients:
            for _ in clients.map(lambda _: self._send_next(), range(count)):
                pass

    def start(self, count: int) -> Callable[[], object]:
        """Send this many requests in the background. The returned function waits until all have a response."""
        before = self.events

        def run() -> int:
            self.run(count)
            return self.events - before

        pool = ThreadPoolExecutor(1)
        running = self._background = pool.submit(run)
        pool.shutdown(wait=False)
        return running.result

    def require_events(self, needed: int) -> None:
        """Raise Failure if the background traffic ended with fewer events. Also raise what `plan` has raised."""
        if self._background.done() and (written := self._background.result()) < needed:
            raise Failure(
                f"the requests of Workload.plan() wrote {written} events, and the walkthrough needs {needed}",
                "in demo/workload.py, let plan() keep returning requests that succeed and write events",
                code="workload-idle",
            )

    def stop(self) -> None:
        """Send no more requests. Background traffic ends soon."""
        self._stopped.set()

    def _send_next(self) -> None:
        with self._one_at_a_time:
            request = self._workload.plan()
        response = self._send(request)
        if response is None:
            return
        with self._one_at_a_time:
            self._count(request, response)
            if isinstance(self._workload, Listener):
                self._workload.answered(request, response.status_code, json_of(response))

    def _send_and_read(self, planned: Sequence[Request]) -> list[Any]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            responses = list(clients.map(self._send, planned))
        for request, response in zip(planned, responses, strict=True):
            if response is not None:
                self._count(request, response)
        if self.surprises:
            raise Failure(self.surprises[0])
        return [response.json() for response in responses if response is not None]

    def _count(self, request: Request, response: requests.Response) -> None:
        may_succeed = any(status < requests.codes.bad_request for status in request.expected)
        self.answered[f"{request.kind} refused" if may_succeed and not response.ok else request.kind] += 1
        self.events += request.events if response.ok else 0
        if response.status_code not in request.expected:
            self.surprises.append(f"{request.kind} got {response.status_code}: {response.text[:200]}")

    def _send(self, request: Request) -> requests.Response | None:
        """Repeat with the same key until there is a response: 503 and a broken connection leave the outcome unknown.

        Returns None if the traffic was stopped before.
        """
        key = key_of(request)

        def answer() -> tuple[requests.Response | None] | None:
            if self._stopped.is_set():
                return (None,)
            try:
                response = self._service.send(self.session(), request, key, TIMEOUT_S)
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
                return None
            return None if response.status_code == requests.codes.unavailable else (response,)

        return wait_for("a response of the service", answer, timeout_s=RETRY_TIMEOUT_S, needs=self._needs)[0]

    def session(self) -> requests.Session:
        if not hasattr(self._sessions, "session"):
            self._sessions.session = requests.Session()
        session: requests.Session = self._sessions.session
        return session
