"""Debezium's JDBC sink connector, in a Connect worker of its own: a row for each event, by an UPSERT on its id.

It has no balances: those would be a view on its table. So it does less than the others.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.kafka.clients import client_config, spark_options
from outbox_lab.stack import ivy
from outbox_lab.stack.connect import CLIENTS
from outbox_lab.stack.kafka import Jvm

from bench import backlog
from bench.event import topic
from bench.meter import Drain, Meter

NAME = "jdbc"
TABLE = "jdbc_events"
IVY_FILE = Path(__file__).with_name("jdbc.ivy.xml")
COMMIT_INTERVAL_MS = 500
STRING, INTEGER = {"type": "string"}, {"type": "int64"}
EVENT = {
    "transfer_id": STRING,
    "account_id": STRING,
    "amount": INTEGER,
    "currency": STRING,
    "balance_after": INTEGER,
    "version": INTEGER,
    "occurred_at": STRING,
}


class JdbcSink(Jvm):
    """A standalone worker with that connector alone."""

    main_class = "org.apache.kafka.connect.cli.ConnectStandalone"
    heap = "512m"

    def __init__(self, settings: Settings) -> None:
        super().__init__(NAME, settings.home)
        self._settings = settings
        self._connector_name = f"{NAME}-{uuid.uuid4()}"  # and so its consumer group: each begins at the beginning

    def arguments(self) -> Sequence[str | Path]:
        return [self.folder / "worker.properties", self.folder / "connector.properties"]

    def prepare(self) -> None:
        _write(self.folder / "worker.properties", self._worker())
        _write(self.folder / "connector.properties", self._connector())

    def is_ready(self) -> bool:
        return self.is_running()

    @contextmanager
    def applied(self) -> Iterator[Callable[[], int]]:
        """A function that says how many events it has applied, by the offsets that it has committed."""
        numbers = topics.first_offsets(self._settings, topic(self._settings))
        places = [TopicPartition(topic(self._settings), number) for number in numbers]
        group = f"connect-{self._connector_name}"
        with closing(Consumer({**client_config(self._settings), "group.id": group})) as consumer:
            yield lambda: sum(max(0, place.offset) for place in consumer.committed(places))

    def _worker(self) -> Mapping[str, object]:
        kafka = {name.removeprefix("kafka."): value for name, value in spark_options(self._settings).items()}
        return {
            **{f"{prefix}{name}": value for prefix in CLIENTS for name, value in kafka.items()},
            "listeners": "http://127.0.0.1:0",
            "plugin.path": ivy.resolve(IVY_FILE, NAME),
            "plugin.discovery": "service_load",
            "offset.storage.file.filename": self.folder / "offsets",
            "offset.flush.interval.ms": COMMIT_INTERVAL_MS,
            "key.converter": "org.apache.kafka.connect.storage.StringConverter",
            "value.converter": "org.apache.kafka.connect.storage.StringConverter",
            "header.converter": "org.apache.kafka.connect.storage.StringConverter",
            "consumer.isolation.level": "read_committed",
        }

    def _connector(self) -> Mapping[str, object]:
        dsn = self._settings.dsn(SinkRole.OWNER)
        fields = [{"field": name, **of_field} for name, of_field in EVENT.items()]
        return {
            "name": self._connector_name,
            "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
            "topics": topic(self._settings),
            "connection.url": f"jdbc:postgresql://{dsn['host']}:{dsn['port']}/{dsn['dbname']}",
            "connection.username": dsn["user"],
            "connection.password": dsn["password"],
            "insert.mode": "upsert",
            "primary.key.mode": "record_header",
            "primary.key.fields": "id",
            "schema.evolution": "basic",
            "collection.name.format": TABLE,
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter.schemas.enable": "true",
            "value.converter.schema.content": json.dumps({"type": "struct", "fields": fields}),
        }


def drain(settings: Settings, meter: Meter) -> Drain:
    """Drain the topic with it."""
    process = JdbcSink(settings)
    return backlog.drain_with(process, process.applied(), meter)


def _write(file: Path, properties: Mapping[str, object]) -> None:
    file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
