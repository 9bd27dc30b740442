"""The demo's requests to this project's service: accounts are opened and funded, some are frozen or closed, then money
is transferred.

The walkthrough, `outbox demo`, plays it. A project of another domain replaces it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

from outbox_lab.walkthrough import Request

ACCOUNTS = 100
ACCOUNTS_MIN = ACCOUNTS // 2  # so many stay open
FROZEN = CLOSED = 5  # beside these
FUNDS_MINOR = 1_000_000
INVALID_SHARE, OPENING_SHARE, FREEZE_SHARE = 0.05, 0.01, 0.005
LABELS = ("rent", "food", "holidays", "savings", "")


class Workload:
    """Plans requests from a seed: who pays whom how much, whose account is frozen, and which requests are invalid."""

    right = "balances"  # the sink that is right under every fault
    naive = "balances-naive"  # and one that is not

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._accounts: list[str] = []
        self._frozen: list[str] = []
        self._closed: list[str] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        """Open accounts, fund them from a system account, and freeze or close some."""
        kinds = ["system", *["user"] * (ACCOUNTS + FROZEN + CLOSED)]
        bank, *users = (account["id"] for account in send([self._opening(kind) for kind in kinds]))
        self._accounts = users[:ACCOUNTS]
        self._frozen, self._closed = users[ACCOUNTS : ACCOUNTS + FROZEN], users[ACCOUNTS + FROZEN :]
        funded = [*self._accounts, *self._frozen]
        send([_transfer("funding", _body(bank, account, FUNDS_MINOR), (201,)) for account in funded])
        send(
            [
                *(_change(account, "freeze", {"reason": "court order"}, (200,)) for account in self._frozen),
                *(_change(account, "close", {}, (200,)) for account in self._closed),
            ]
        )

    def plan(self) -> Request:
        """A transfer in most cases; else an account is opened or frozen, or the request is invalid."""
        chance = self._random.random()
        if chance < INVALID_SHARE:
            return self._invalid()
        if chance < INVALID_SHARE + OPENING_SHARE:
            return self._opening("user")
        if chance < INVALID_SHARE + OPENING_SHARE + FREEZE_SHARE and len(self._accounts) > ACCOUNTS_MIN:
            account = self._accounts.pop()  # transfers that are under way may be refused: 409 is expected of each
            self._frozen.append(account)
            return _change(account, "freeze", {"reason": "court order"}, (200,))
        return _transfer("transfer", self._transfer_body(), (201, 409))

    def answered(self, request: Request, status: int, body: Any) -> None:
        """Use an account that was opened."""
        if request.kind == "account" and status == HTTPStatus.CREATED:
            self._accounts.append(body["id"])

    def _invalid(self) -> Request:
        body = self._transfer_body()
        stranger = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        frozen, closed = self._frozen[0], self._random.choice(self._closed)
        return self._random.choice(
            [
                Request("not JSON", "/transfers", b"{amount: ", (400,)),
                Request("no token", "/transfers", body, (401,), has_token=False),
                Request("unknown account", "/transfers", {**body, "to_account": stranger}, (404,)),
                Request("insufficient funds", "/transfers", {**body, "amount": 10**15}, (409,)),
                Request("frozen account", "/transfers", {**body, "from_account": frozen}, (409,)),
                Request("closed account", "/transfers", {**body, "to_account": closed}, (409,)),
                Request("negative amount", "/transfers", {**body, "amount": -1}, (422,)),
                Request("no Idempotency-Key", "/transfers", body, (400, 422), has_key=False),
                Request("frozen again", f"/accounts/{frozen}/freeze", {"reason": "again"}, (409,)),
                Request("closed with money", f"/accounts/{frozen}/close", {}, (409,)),
            ]
        )

    def _transfer_body(self) -> dict[str, object]:
        source, target = self._random.sample(self._accounts, 2)
        return _body(source, target, self._random.randint(1, 5_000))

    def _opening(self, kind: str) -> Request:
        body = {"currency": "EUR", "kind": kind, "label": self._random.choice(LABELS)}
        return Request("account", "/accounts", body, (201,), events=1)


def _body(source: str, target: str, amount: int) -> dict[str, object]:
    return {"from_account": source, "to_account": target, "amount": amount}


def _transfer(kind: str, body: object, expected: tuple[int, ...]) -> Request:
    return Request(kind, "/transfers", body, expected, events=2)


def _change(account: str, kind: str, body: object, expected: tuple[int, ...]) -> Request:
    return Request(kind, f"/accounts/{account}/{kind}", body, expected, events=1)
