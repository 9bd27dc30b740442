"""The clients: they send what the domain plans, repeat what they got no answer to, and write the history."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import requests

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.soak.domain import Domain
from outbox.soak.history import Attempt, Recorder
from outbox.walkthrough.workload import Listener, Request

CLIENTS = 4
TIMEOUT_S = 5.0
SET_UP_TIMEOUT_S = 60.0
ATTEMPTS = 6  # then a client gives up: the outcome stays unknown
AGAIN_S = (0.2, 3.0)  # how long a client waits before it repeats a request: from, to
REPEATED = 0.03  # the share of answered requests that a client sends again, as if it had missed the answer


class Clients:
    """Several clients, which together send a number of requests per second."""

    def __init__(self, settings: Settings, domain: Domain, recorder: Recorder, rate: float, seed: int) -> None:
        """``settings``: with the port at which clients reach the service. ``rate``: requests per second."""
        self._url = f"http://{settings.service_host}:{settings.service_port}"
        self._token = settings.service_token.get_secret_value()
        self._domain, self._recorder = domain, recorder
        self._interval_s = CLIENTS / rate
        self._seed = seed
        self._planning = threading.Lock()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._running: list[Future[None]] = []
        self.began_s = time.monotonic()

    def set_up(self) -> None:
        """Let the domain create its entities. Raises Failure if the service refuses."""
        with requests.Session() as session:

            def send(planned: Sequence[Request]) -> list[Any]:
                return [self._made(session, request) for request in planned]

            self._domain.set_up(send)

    def start(self) -> None:
        """Send in the background until `stop`."""
        self._running = [self._pool.submit(self._run, number) for number in range(CLIENTS)]

    def stop(self) -> None:
        """Send nothing more, and return when every request has ended. Raises what a client has raised."""
        self._stopped.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()

    def require_running(self) -> None:
        """Raises what a client has raised."""
        for one in self._running:
            if one.done():
                one.result()

    def _made(self, session: requests.Session, request: Request) -> Any:
        attempt = self._attempt(session, 0, request, _key(request), SET_UP_TIMEOUT_S)
        if attempt.outcome != "ok":
            raise Failure(f"the service answered {attempt.status} to {request.kind}: {attempt.answer}")
        return attempt.answer

    def _run(self, client: int) -> None:
        chance = random.Random(f"{self._seed} client {client}")  # noqa: S311
        with requests.Session() as session:
            while not self._stopped.wait(chance.uniform(0.5, 1.5) * self._interval_s):
                with self._planning:
                    request = self._domain.plan()
                self._send(session, client, request, chance)

    def _send(self, session: requests.Session, client: int, request: Request, chance: random.Random) -> None:
        """Send a request until there is an answer, with the same key; and some of them once more."""
        key = _key(request)
        for _ in range(ATTEMPTS):
            attempt = self._attempt(session, client, request, key, TIMEOUT_S)
            if attempt.outcome != "unknown":
                with self._planning:
                    if isinstance(self._domain, Listener):
                        self._domain.answered(request, attempt.status or 0, attempt.answer)
                if key is not None and chance.random() < REPEATED:
                    self._attempt(session, client, request, key, TIMEOUT_S)
                return
            if self._stopped.wait(chance.uniform(*AGAIN_S)):
                return

    def _attempt(
        self, session: requests.Session, client: int, request: Request, key: str | None, timeout_s: float
    ) -> Attempt:
        headers = {"Content-Type": "application/json"}
        if request.has_token:
            headers["Authorization"] = f"Bearer {self._token}"
        if key is not None:
            headers["Idempotency-Key"] = key
        data = request.body if isinstance(request.body, bytes) else json.dumps(request.body).encode()
        sent_s = time.monotonic()
        status = answer = None
        try:
            response = session.request(
                request.method,
                self._url + request.path,
                data=None if request.method == "GET" else data,
                headers=headers,
                timeout=timeout_s,
            )
            status, answer = response.status_code, _json(response)
        except requests.RequestException:
            pass  # nobody knows what came of it
        attempt = Attempt(
            client=client,
            kind=request.kind,
            method=request.method,
            path=request.path,
            key=key,
            body=None if isinstance(request.body, bytes) else request.body,
            sent_s=sent_s - self.began_s,
            ended_s=time.monotonic() - self.began_s,
            status=status,
            answer=answer,
        )
        self._recorder.add(attempt)
        return attempt


def _key(request: Request) -> str | None:
    return str(uuid.uuid4()) if request.has_key else None


def _json(response: requests.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
