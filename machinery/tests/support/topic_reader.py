"""The topics of the events, read back as a read_committed reader sees them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from confluent_kafka import Message, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not said in its stubs
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.relay.connectors import Connector
from outbox_lab.testing.helpers import query
from tests import items
from tests.support.outbox_rows import ids


def topic_of(settings: Settings, aggregate: str | None = None) -> str:
    """The topic of an aggregate type; of the one of the test's rows by default."""
    return catalog.of_project(settings).aggregates[aggregate or items.AGGREGATE].topic


class Record(NamedTuple):
    topic: str
    partition: int
    offset: int
    key: str
    value: str
    headers: dict[str, str | None]
    timestamp_ms: int

    @property
    def id(self) -> str:
        """The event's id; empty if the record names none."""
        return self.headers.get("id") or ""


class Log:
    """Topics as a read_committed reader sees them, read on from where it was; by default all of the catalog."""

    def __init__(self, settings: Settings, names: Collection[str] | None = None) -> None:
        self._settings = settings
        self.records: list[Record] = []
        names = sorted(catalog.of_project(settings).topics if names is None else names)
        self._next = {name: topics.first_offsets(settings, name) for name in names}

    def read(self) -> list[Record]:
        """Everything committed by now."""
        for name, first in self._next.items():
            end = topics.last_stable_offsets(self._settings, name)
            within = {one: (first.get(one, 0), offset) for one, offset in end.items() if offset > first.get(one, 0)}
            if within:
                self.records += map(_record, records.read(self._settings, name, within))
                first.update(end)
        return self.records

    def wait_for(self, wanted: Collection[str], timeout_s: float = 60) -> list[Record]:
        """Read until all these events have come; what else has come by then is returned too."""

        def missing() -> set[str]:
            return set(wanted) - {record.id for record in self.read()}

        wait_for(f"{len(wanted)} events on the topics", lambda: not missing(), timeout_s=timeout_s, poll_s=0.02)
        return self.records

    def close(self) -> None:
        """Nothing is open between two reads."""


def _record(message: Message) -> Record:
    headers = records.headers_of(message)
    assert len(dict(headers)) == len(headers), headers
    return Record(
        topic=message.topic() or "",
        partition=message.partition() or 0,
        offset=message.offset() or 0,
        key=_text(message.key()) or "",
        value=_text(message.value()) or "",
        headers={name: _text(value) for name, value in headers},
        timestamp_ms=message.timestamp()[1],
    )


def _text(content: str | bytes | None) -> str | None:
    """A key, a value or a header; what is no text is no event of ours."""
    return content.decode(errors="replace") if isinstance(content, bytes) else content


def read(settings: Settings) -> list[Record]:
    """Everything committed on the topics by now."""
    with closing(Log(settings)) as log:
        return log.read()


def delete_topics(settings: Settings, *names: str) -> None:
    """Delete topics, and wait until the brokers do not know them any more."""
    admin = AdminClient(client_config(settings))
    for request in admin.delete_topics([*names]).values():
        request.result(30)
    wait_for("the topics to be gone", lambda: not topics.existing(settings, names), timeout_s=30)


def configure(settings: Settings, topic: str, name: str, value: str) -> None:
    """Set an option of a topic."""
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
    resource.add_incremental_config(ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET))
    admin = AdminClient(client_config(settings))
    admin.incremental_alter_configs([resource])[resource].result(10)


def drop_records(settings: Settings, topic: str, before: int, partition: int = 0) -> None:
    """Let a topic drop the records of a partition before an offset, as retention does."""
    admin = AdminClient(client_config(settings))  # which has to live until it has the answer
    for request in admin.delete_records([TopicPartition(topic, partition, before)]).values():
        request.result(30)


def later() -> datetime:
    """A moment after what was sent and before what will be: Kafka counts in milliseconds."""
    now = datetime.now(UTC)
    wait_for("the clock to go on", lambda: datetime.now(UTC) > now + timedelta(milliseconds=5), timeout_s=5)
    return now + timedelta(milliseconds=2)


def relayed(settings: Settings, wanted: Collection[str] | None = None, timeout_s: float = 60) -> list[Record]:
    """Wait until these events, or all in the outbox table, are on the topics, and return all that is on them."""
    with closing(Log(settings)) as log:
        return log.wait_for(ids(settings) if wanted is None else wanted, timeout_s)


def captured(settings: Settings, connector: Connector, table: str) -> list[Record]:
    """Wait until the newest version of each row of a captured table is on its topic, and return all that is on it.

    The table has the columns ``id`` and ``version``.
    """
    versions = dict(query(settings, f"SELECT id::text, version FROM {table}"))
    with closing(Log(settings, [connector.topic])) as log:

        def all_there() -> bool:
            rows = [json.loads(record.value)["after"] for record in log.read()]
            return {row["id"]: row["version"] for row in rows if row} == versions

        wait_for(f"the newest version of each row of {table} on the topic", all_there, timeout_s=60)
        return log.records


def duplicates(records: Sequence[Record]) -> int:
    """How many records carry an event that another one has brought already."""
    return len(records) - len({record.id for record in records})


def out_of_order(records: Sequence[Record]) -> list[str]:
    """Keys whose events came first in another order than that of their versions, or on more than one partition."""
    seen: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    partitions: dict[tuple[str, str], set[int]] = defaultdict(set)
    for record in sorted(records, key=lambda record: (record.topic, record.partition, record.offset)):
        key = record.topic, record.key
        seen[key].setdefault(record.id, json.loads(record.value)["version"])
        partitions[key].add(record.partition)
    return [
        key
        for (topic, key), versions in seen.items()
        if list(versions.values()) != sorted(versions.values()) or len(partitions[topic, key]) > 1
    ]
