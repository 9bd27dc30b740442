"""What the demo sends to this project's service: accounts are opened and funded, then money is transferred.

This is the only module of demo/ that knows the domain. A project of another domain replaces it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from demo.traffic import Request

ACCOUNTS = 100
FUNDS_MINOR = 1_000_000
INVALID_SHARE = 0.05


class Workload:
    """Plans requests from a seed: who pays whom how much, and which requests are invalid."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._accounts: list[str] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        """Open accounts, and fund each of them from a system account."""
        kinds = ["system", *["user"] * ACCOUNTS]
        opened = send([Request("account", "/accounts", {"currency": "EUR", "kind": kind}, (201,)) for kind in kinds])
        bank, *self._accounts = (account["id"] for account in opened)
        send([_transfer("funding", _body(bank, account, FUNDS_MINOR), (201,)) for account in self._accounts])

    def plan(self) -> Request:
        """A transfer; one in twenty is invalid. Each transfer writes an event for either account."""
        source, target = self._random.sample(self._accounts, 2)
        body = _body(source, target, self._random.randint(1, 5_000))
        if self._random.random() >= INVALID_SHARE:
            return _transfer("transfer", body, (201, 409))
        stranger = str(uuid.UUID(int=self._random.getrandbits(128), version=4))
        return self._random.choice(
            [
                Request("not JSON", "/transfers", b"{amount: ", (400,)),
                Request("no token", "/transfers", body, (401,), has_token=False),
                Request("unknown account", "/transfers", {**body, "to_account": stranger}, (404,)),
                Request("insufficient funds", "/transfers", {**body, "amount": 10**15}, (409,)),
                Request("negative amount", "/transfers", {**body, "amount": -1}, (422,)),
                Request("no Idempotency-Key", "/transfers", body, (400, 422), has_key=False),
            ]
        )


def _body(source: str, target: str, amount: int) -> dict[str, object]:
    return {"from_account": source, "to_account": target, "amount": amount}


def _transfer(kind: str, body: object, expected: tuple[int, ...]) -> Request:
    return Request(kind, "/transfers", body, expected, events=2)
