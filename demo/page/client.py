"""A client of the ledger's service, with a few accounts of its own."""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from confluent_kafka import Producer
from outbox import Failure, Settings
from outbox_lab.walkthrough import client_config

ACCOUNTS = 6  # few, so that people can follow each by its colour
FUNDS_MINOR = 1_000_000
CLIENTS = 4
TIMEOUT_S = 30.0


class Client:
    """Sends requests as any client does: with the service's token, and an Idempotency-Key each."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._url = settings.service_url
        self._accounts: list[str] = []
        self._random = random.Random()

    def transfer(self) -> Mapping[str, Any]:
        """Move some money between two of its accounts, and return the transfer."""
        source, target = self._random.sample(self._opened(), 2)
        body = {"from_account": source, "to_account": target, "amount": self._random.randint(1, 5_000)}
        return self._post("/transfers", body)

    def transfers(self, count: int) -> int:
        """So many transfers, several at a time."""
        self._opened()
        with ThreadPoolExecutor(CLIENTS) as pool:
            return sum(1 for _ in pool.map(lambda _: self.transfer(), range(count)))

    def open_account(self, label: str) -> Mapping[str, Any]:
        """Open an account."""
        return self._post("/accounts", {"currency": "EUR", "kind": "user", "label": label})

    def _opened(self) -> list[str]:
        if not self._accounts:
            bank = self._post("/accounts", {"currency": "EUR", "kind": "system", "label": "page"})["id"]
            accounts = [str(self.open_account(f"page {number + 1}")["id"]) for number in range(ACCOUNTS)]
            for account in accounts:
                self._post("/transfers", {"from_account": bank, "to_account": account, "amount": FUNDS_MINOR})
            self._accounts = accounts
        return self._accounts

    def _post(self, path: str, body: object) -> Mapping[str, Any]:
        headers = {
            "Authorization": f"Bearer {self._settings.service_token.get_secret_value()}",
            "Idempotency-Key": str(uuid.uuid4()),
        }
        try:
            response = requests.post(self._url + path, json=body, headers=headers, timeout=TIMEOUT_S)
        except requests.RequestException:
            raise Failure("the service does not answer", code="service-unavailable") from None
        if not response.ok:
            raise Failure(f"the service answered {response.status_code}", code="service-refused")
        found: Mapping[str, Any] = response.json()
        return found


def write_bad_record(settings: Settings, text: str) -> tuple[str, int, int]:
    """Write a record to the topic of the balances as a program that is not the relay would: with the headers of an
    event, and a payload that its schema refuses. Return topic, partition and offset.
    """
    topic = f"{settings.topic_prefix}.balance"
    event_id = uuid7()
    value = {"transfer_id": text, "account_id": event_id, "amount": "much", "occurred_at": text}
    placed: list[tuple[str, int, int]] = []
    failed: list[str] = []

    def delivered(error: object, message: Any) -> None:
        if error is None:
            placed.append((message.topic(), message.partition(), message.offset()))
        else:
            failed.append(str(error))

    producer = Producer({**client_config(settings), "log_level": 0})  # the error is reported below
    headers = {"id": event_id, "eventType": "credited", "schemaVersion": "1"}
    producer.produce(
        topic,
        json.dumps(value).encode(),
        key=event_id.encode(),
        headers=[(name, one.encode()) for name, one in headers.items()],
        on_delivery=delivered,
    )
    producer.flush(TIMEOUT_S)
    if not placed:
        raise Failure(f"Kafka did not take the record: {failed[0] if failed else 'no answer'}", code="record-refused")
    return placed[0]


def uuid7() -> str:
    """A UUIDv7 of this moment."""
    number = (time.time_ns() // 1_000_000 << 80) | random.getrandbits(80)
    number = number & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=number & ~(0x3 << 62) | 0x2 << 62))
