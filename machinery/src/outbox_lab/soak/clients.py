"""The clients: they send what the domain plans, repeat what they got no answer to, and write the history."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from outbox.base.errors import Failure
from outbox.base.heavy import requests
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox_lab.soak.domain import Domain
from outbox_lab.soak.history import SET_UP, Attempt, Recorder
from outbox_lab.walkthrough.traffic import Service, json_of, key_of
from outbox_lab.walkthrough.workload import Listener, Request

CLIENTS = 4
TIMEOUT_S = 5.0
SET_UP_TIMEOUT_S = 60.0
ANSWERED_TIMEOUT_S = 120.0  # after the last fault, for more attempts than `judge.LAST`
ATTEMPTS = 6  # then a client gives up: the outcome stays unknown
AGAIN_S = (0.2, 3.0)  # how long a client waits before it repeats a request: from, to
KEPT = 200  # answered requests whose keys may be used again much later
REUSED = 0.005  # the share of requests after which one of these keys is used again, for its request or for another one
REPEATED = 0.03  # the share of answered requests that a client sends again, as if it had missed the answer


class Clients:
    """Several clients, which together send a number of requests per second."""

    def __init__(self, settings: Settings, domain: Domain, recorder: Recorder, rate: float, seed: int) -> None:
        """``settings``: with the port at which clients reach the service. ``rate``: requests per second."""
        self._service = Service(settings)
        self._domain, self._recorder = domain, recorder
        self._interval_s = CLIENTS / rate
        self._seed = seed
        self._planning = threading.Lock()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(CLIENTS)
        self._running: list[Future[None]] = []
        self._kept: list[tuple[Request, str]] = []
        self.began_s = time.monotonic()

    def set_up(self) -> None:
        """Let the domain create its entities. Raises Failure if the service refuses."""
        with requests.Session() as session:

            def made(request: Request) -> Any:
                attempt = self._attempt(session, SET_UP, request, key_of(request), SET_UP_TIMEOUT_S)
                if attempt.outcome != "ok":
                    raise Failure(f"the service answered {attempt.status} to {request.kind}: {attempt.answer}")
                return attempt.answer

            self._domain.set_up(lambda planned: [made(request) for request in planned])

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Send in the background until the end of the block, and return when every request has ended."""
        self._running = [self._pool.submit(self._run, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            self._stopped.set()
            self._pool.shutdown()
        self.require_running()

    def wait_answered(self) -> None:
        """Wait until a change that is sent from now on is acknowledged, after the last fault.

        Return after a while without one, too: then `judge.silence` has a finding.
        """
        enough = self._recorder.acknowledged + CLIENTS  # as many as are under way at most
        what, recorder, needs = "acknowledged changes", self._recorder, self.require_running
        with suppress(TimeoutError):
            wait_for(what, lambda: recorder.acknowledged > enough, timeout_s=ANSWERED_TIMEOUT_S, needs=needs)

    def require_running(self) -> None:
        """Raises Failure if a client has ended by an exception, such as one of the domain."""
        for one in self._running:
            error = one.exception() if one.done() else None
            if error is not None:
                why = f"a client has ended: {type(error).__name__}: {error}"
                raise Failure(why, code="soak-client-ended") from error

    def _run(self, client: int) -> None:
        chance = random.Random(f"{self._seed} client {client}")  # noqa: S311
        with requests.Session() as session:
            while not self._stopped.wait(chance.uniform(0.5, 1.5) * self._interval_s):
                with self._planning:
                    request = self._domain.plan()
                self._send(session, client, request, chance)
                if chance.random() < REUSED:
                    self._use_again(session, client, chance)

    def _send(self, session: requests.Session, client: int, request: Request, chance: random.Random) -> None:
        """Send a request until there is an answer, with the same key; and some of them once more."""
        key = key_of(request)
        for _ in range(ATTEMPTS):
            attempt = self._attempt(session, client, request, key, TIMEOUT_S)
            if attempt.outcome != "unknown":
                self._note(request, key, attempt, chance)
                if key is not None and chance.random() < REPEATED:
                    self._attempt(session, client, request, key, TIMEOUT_S)
                return
            if self._stopped.wait(chance.uniform(*AGAIN_S)):
                return

    def _note(self, request: Request, key: str | None, attempt: Attempt, chance: random.Random) -> None:
        """Tell the domain of an answer, and keep some of the keys: any of the run with the same chance, roughly."""
        with self._planning:
            if isinstance(self._domain, Listener):
                self._domain.answered(request, attempt.status or 0, attempt.answer)
            if key is not None and attempt.outcome == "ok" and not isinstance(request.body, bytes):
                if len(self._kept) < KEPT:
                    self._kept.append((request, key))
                elif chance.random() < REPEATED:
                    self._kept[chance.randrange(KEPT)] = request, key

    def _use_again(self, session: requests.Session, client: int, chance: random.Random) -> None:
        """Send an old key again, with its own body or with that of another request to the same path."""
        with self._planning:
            if not self._kept:
                return
            request, key = chance.choice(self._kept)
            others = [other for other, _ in self._kept if other.path == request.path and other.body != request.body]
        if others and chance.random() < 1 / 2:
            request = chance.choice(others)
        self._attempt(session, client, request, key, TIMEOUT_S)

    def _attempt(
        self, session: requests.Session, client: int, request: Request, key: str | None, timeout_s: float
    ) -> Attempt:
        sent_s = time.monotonic()
        status = answer = None
        try:
            response = self._service.send(session, request, key, timeout_s)
            status, answer = response.status_code, json_of(response)
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
            expected=request.expected,
        )
        self._recorder.add(attempt)
        return attempt
