"""Events of the sample's shape, made without the service."""

from __future__ import annotations

import json
import time
import uuid
from datetime import UTC, datetime

from confluent_kafka import Message
from outbox.base.settings import Settings


def uuid7(at_ms: int | None = None) -> uuid.UUID:
    """A UUIDv7 (RFC 9562, 5.7) of now or of another time: 48 bits of milliseconds, version, variant, random bits."""
    random = uuid.uuid4().bytes
    millis = time.time_ns() // 1_000_000 if at_ms is None else at_ms
    return uuid.UUID(bytes=millis.to_bytes(6, "big") + bytes([0x70 | random[6] & 0x0F]) + random[7:])


def topic(settings: Settings) -> str:
    """The topic of the balances."""
    return f"{settings.topic_prefix}.balance"


def payload(account_id: str, amount_minor: int, version: int) -> str:
    """The payload of balance.credited, version 1. The amounts of an account add up from zero."""
    return json.dumps(
        {
            "transfer_id": str(uuid.uuid4()),
            "account_id": account_id,
            "amount": amount_minor,
            "currency": "EUR",
            "balance_after": amount_minor * version,
            "version": version,
            "occurred_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
    )


def event_id(message: Message) -> str:
    """The id in the headers of an event."""
    value = dict(message.headers() or []).get("id")
    return value.decode() if isinstance(value, bytes) else str(value)
