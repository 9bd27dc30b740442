"""The workload: accounts, and bursts of transfers whose amounts are the same in every run."""

from __future__ import annotations

import random
import uuid
from http import HTTPStatus

from outbox import Settings
from outbox_lab.testing import ServiceClient

from service.app import create_app

SEED = 25
USERS = 6
FUNDS_MINOR = 1_000_000
TRANSFERS = 20  # of a burst, with two events each
AMOUNT_MAX_MINOR = 5_000


class Ledger:
    """The service, in this process, with one client."""

    def __init__(self, settings: Settings) -> None:
        """Open the accounts, and fund them from a system account."""
        self._client = ServiceClient(create_app(settings), settings)
        bank, *self._users = [self._open(kind) for kind in ("system", *["user"] * USERS)]
        for user in self._users:
            self._transfer(bank, user, FUNDS_MINOR)

    def burst(self, name: str) -> None:
        """Make the transfers of this name: between the same accounts, with the same amounts, in every run."""
        chance = random.Random(f"{SEED} {name}")
        for _ in range(TRANSFERS):
            source, target = chance.sample(self._users, 2)
            self._transfer(source, target, chance.randint(1, AMOUNT_MAX_MINOR))

    def touch_each(self) -> None:
        """Write another event of each account, so that whatever was repeated before it has arrived when it arrives."""
        for source, target in zip(self._users, [*self._users[1:], self._users[0]], strict=True):
            self._transfer(source, target, 1)

    def _open(self, kind: str) -> str:
        return self._made("/accounts", {"currency": "EUR", "kind": kind, "label": ""})

    def _transfer(self, source: str, target: str, amount_minor: int) -> None:
        self._made("/transfers", {"from_account": source, "to_account": target, "amount": amount_minor})

    def _made(self, path: str, body: object) -> str:
        response = self._client.post(path, body, Idempotency_Key=str(uuid.uuid4()))
        if response.status_code != HTTPStatus.CREATED:
            raise RuntimeError(f"the service answered {response.status_code} to {path}: {response.text}")
        return str(response.get_json()["id"])
