"""The records of the two topics that the sinks read, and which of them repeat another one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from confluent_kafka import Message
from outbox import Settings
from outbox.kafka import records, topics

Offsets = Mapping[int, int]  # by partition


class Record(NamedTuple):
    """A record of a topic. Two records with one identity repeat each other."""

    partition: int
    offset: int
    identity: str  # of an event its id; of a row of `accounts` its key and version
    key: str
    amount: int  # that an event adds to the balance of its account, in minor units; 0 for a row

    def is_within(self, first: Offsets, end: Offsets) -> bool:
        """Whether it lies between these offsets."""
        return first.get(self.partition, 0) <= self.offset < end.get(self.partition, 0)


def messages(settings: Settings, topic: str) -> list[Message]:
    """Everything committed on a topic by now."""
    return list(records.read(settings, topic, topics.watermarks(settings, topic)))


def read(settings: Settings, topic: str) -> list[Record]:
    """The records of a topic."""
    return [_record(message) for message in messages(settings, topic)]


def repeats(before: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """New records that repeat an earlier one."""
    seen = {record.identity for record in before}
    found = []
    for record in new:
        if record.identity in seen:
            found.append(record)
        seen.add(record.identity)
    return found


def _record(message: Message) -> Record:
    value = json.loads(message.value() or b"{}")
    headers: dict[str, Any] = dict(message.headers() or [])
    if "id" in headers:
        identity, key, amount = headers["id"].decode(), value["account_id"], value["amount"]
    else:
        row = value["after"]
        identity, key, amount = f"{row['id']} {row['version']}", row["id"], 0
    return Record(message.partition() or 0, message.offset() or 0, identity, key, amount)
