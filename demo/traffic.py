"""HTTP traffic for the ledger, planned from a seed: transfers between accounts, some of them invalid requests."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import requests

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for

CLIENTS = 4
TIMEOUT_S = 30.0
FUNDS_MINOR = 1_000_000
RETRY_TIMEOUT_S = 60.0
BAD_SHARE = 0.05


@dataclass(frozen=True)
class Request:
    """A request, and the statuses that the service may answer."""

    kind: str
    body: object
    expected: tuple[int, ...]
    key: str | None = None
    token: bool = True


class Traffic:
    """Plans requests and sends them by several clients.

    The seed decides who pays whom how much. The order in which the service receives them depends on the clients.
    """

    def __init__(self, settings: Settings, seed: int) -> None:
        self._url = f"http://{settings.service_host}:{settings.service_port}"
        self._token = settings.service_token.get_secret_value()
        self._random = random.Random(seed)
        self._sessions = threading.local()
        self._stopped = threading.Event()
        self.accounts: list[str] = []
        self.answered: Counter[str] = Counter()  # requests by kind
        self.surprises: list[str] = []  # unexpected responses

    def open_accounts(self, count: int) -> None:
        """Open accounts and fund each of them from a system account."""
        bank = self._open("system")
        self.accounts = [self._open("user") for _ in range(count)]
        self._send_all(
            [
                self._transfer("funding", bank, account, FUNDS_MINOR + self._random.randrange(FUNDS_MINOR), (201,))
                for account in self.accounts
            ]
        )

    def run(self, count: int) -> None:
        """Send this many requests, and return when all have a response."""
        self._send_all([self._plan() for _ in range(count)])

    def start(self, count: int) -> Callable[[], None]:
        """Send this many requests in the background. The returned function waits until all have a response."""
        pool = ThreadPoolExecutor(1)
        running = pool.submit(self.run, count)

        def finish() -> None:
            running.result()
            pool.shutdown()

        return finish

    def stop(self) -> None:
        """Send no more requests. Background traffic ends soon."""
        self._stopped.set()

    @property
    def transfers(self) -> int:
        """Transfers that the service has confirmed."""
        return self.answered["funding"] + self.answered["transfer"]

    # The plan -----------------------------------------------------------------------------------------------------

    def _plan(self) -> Request:
        source, target = self._random.sample(self.accounts, 2)
        amount = self._random.randint(1, 5_000)
        if self._random.random() >= BAD_SHARE:
            return self._transfer("transfer", source, target, amount, (201, 409))
        body = {"from_account": source, "to_account": target, "amount": amount}
        return self._random.choice(
            [
                Request("not JSON", b"{amount: ", (400,), key=self._key()),
                Request("no token", body, (401,), key=self._key(), token=False),
                Request("unknown account", {**body, "to_account": str(self._uuid())}, (404,), key=self._key()),
                Request("insufficient funds", {**body, "amount": 10**15}, (409,), key=self._key()),
                Request("negative amount", {**body, "amount": -amount}, (422,), key=self._key()),
                Request("no Idempotency-Key", body, (400, 422)),
            ]
        )

    def _transfer(self, kind: str, source: str, target: str, amount: int, expected: tuple[int, ...]) -> Request:
        body = {"from_account": source, "to_account": target, "amount": amount}
        return Request(kind, body, expected, key=self._key())

    def _uuid(self) -> uuid.UUID:
        return uuid.UUID(int=self._random.getrandbits(128), version=4)

    def _key(self) -> str:
        return str(self._uuid())

    # The clients --------------------------------------------------------------------------------------------------

    def _open(self, kind: str) -> str:
        answer = self._session().post(
            f"{self._url}/accounts",
            json={"currency": "EUR", "kind": kind},
            headers=self._headers(None),
            timeout=TIMEOUT_S,
        )
        answer.raise_for_status()
        return str(answer.json()["id"])

    def _send_all(self, planned: Sequence[Request]) -> None:
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(self._send, planned))

    def _send(self, request: Request) -> None:
        """Repeat with the same key until there is a response: 503 and a broken connection leave the outcome unknown."""
        if self._stopped.is_set():
            return

        def answer() -> tuple[requests.Response] | None:
            if self._stopped.is_set():
                raise Failure("the traffic was stopped")
            try:
                response = self._session().post(
                    f"{self._url}/transfers",
                    data=request.body if isinstance(request.body, bytes) else None,
                    json=None if isinstance(request.body, bytes) else request.body,
                    headers=self._headers(request.key, token=request.token),
                    timeout=TIMEOUT_S,
                )
            except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError):
                return None
            return None if response.status_code == requests.codes.unavailable else (response,)

        response = wait_for("a response of the service", answer, timeout_s=RETRY_TIMEOUT_S)[0]
        refused = request.kind == "transfer" and response.status_code != requests.codes.created
        self.answered["refused" if refused else request.kind] += 1
        if response.status_code not in request.expected:
            self.surprises.append(f"{request.kind} got {response.status_code}: {response.text[:200]}")

    def _headers(self, key: str | None, token: bool = True) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if token:
            headers["Authorization"] = f"Bearer {self._token}"
        if key is not None:
            headers["Idempotency-Key"] = key
        return headers

    def _session(self) -> requests.Session:
        if not hasattr(self._sessions, "session"):
            self._sessions.session = requests.Session()
        session: requests.Session = self._sessions.session
        return session
