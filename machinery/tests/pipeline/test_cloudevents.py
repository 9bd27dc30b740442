"""The headers of CloudEvents on the real relay, read by the package `cloudevents`; and a sink that ignores them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cloudevents.core.base import BaseCloudEvent
from cloudevents.core.bindings.kafka import KafkaMessage, from_binary
from cloudevents.core.formats.json import JSONFormat

from outbox.base import project
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.relay import lifecycle
from outbox.sink import discovery
from outbox.sink.decoding.decoder import DecodedEvent
from outbox.sink.decoding.records import Record as SinkRecord
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import topic_of
from outbox_lab.testing.helpers import query
from tests.support import suite
from tests.support.outbox_rows import Row, ids, insert, row
from tests.support.topic_reader import Record, relayed

SOURCE = "https://stock.example"
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OURS = {"id", "eventType", "schemaVersion", "traceparent"}


class Chain:
    """A relay whose project names a source of CloudEvents, or none."""

    def __init__(self, settings: Settings, root: Path) -> None:
        self.settings, self._root = settings, root
        self._plain = (root / project.FILE).read_text()

    def name_source(self, source: str) -> None:
        """Let the project name this source."""
        line = f'cloudevents-source = "{source}"\n' if source else ""
        (self._root / project.FILE).write_text(f"{self._plain}{line}")
        project.load.cache_clear()

    def send(self, *rows: Row) -> list[Record]:
        """The records of these rows."""
        before = ids(self.settings)
        insert(self.settings, *rows)
        return [record for record in relayed(self.settings) if record.id not in before]


@pytest.fixture
def chain(databases: Settings, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chain]:
    """A chain without a connector; the events of orders have a topic of their own."""
    root = suite.copied_to(tmp_path / "project")
    monkeypatch.setenv(project.VARIABLE, str(root))
    suffix = databases.source_db_url.name.rpartition("_")[2]
    orders = root / "events" / "order" / catalog.AGGREGATE_FILE
    orders.write_text(f'{orders.read_text()}\ntopic = "Sales-{suffix}"\n')
    with topic_of(databases, stack) as settings:
        yield Chain(settings, root)
        lifecycle.remove(settings, drop_slot=True)


def as_cloudevent(record: Record) -> BaseCloudEvent:
    """A record as the package reads it: it takes no header without a value, such as `traceparent` of no trace."""
    headers = {name: value.encode() for name, value in record.headers.items() if value is not None}
    return from_binary(KafkaMessage(headers, record.key.encode(), record.value.encode()), JSONFormat())


def decoded(settings: Settings, record: Record) -> object:
    """The event that a sink of items decodes from a record, without its id."""
    [decoder] = discovery.event_decoders(settings, ["item"]).values()
    headers = [(name, None if value is None else value.encode()) for name, value in record.headers.items()]
    found = decoder.record(SinkRecord(record.key.encode(), headers, record.value.encode(), record.timestamp_ms))
    assert isinstance(found, DecodedEvent)
    return found._replace(event_id="")


def test_events_are_cloudevents_where_the_project_names_their_source(chain: Chain) -> None:
    assert lifecycle.apply(chain.settings) == "created"
    written = row(quantity=5, traceparent=TRACEPARENT)
    [plain] = chain.send(written)
    assert plain.headers.keys() == OURS

    chain.name_source(SOURCE)
    assert lifecycle.apply(chain.settings) == "updated"
    order = Row("order", "01a1fc75-167d-7239-af57-d1ee1a62e0a6", "placed", json.dumps({"version": 1}))
    sold, bought = sorted(chain.send(written, order), key=lambda record: record.topic.islower())
    assert lifecycle.apply(chain.settings) == "unchanged"

    for record, aggregate, sent in ((sold, "order", order), (bought, "item", written)):
        event = as_cloudevent(record)
        assert event.get_id() == record.id
        assert (event.get_source(), event.get_type()) == (f"{SOURCE}/{aggregate}", sent.type)
        assert (event.get_subject(), event.get_specversion()) == (sent.aggregateid, "1.0")
        assert event.get_datacontenttype() == "application/json"
        [(occurred_at,)] = query(chain.settings, f"SELECT occurred_at FROM outbox WHERE id = '{record.id}'")
        assert isinstance(occurred_at, datetime)
        assert event.get_time() == occurred_at.replace(tzinfo=UTC)
        assert event.get_data() == json.loads(sent.payload)
    # What ours read is unchanged.
    assert {name: bought.headers[name] for name in OURS} == {**plain.headers, "id": bought.id}
    assert (bought.topic, bought.key, bought.value) == (plain.topic, plain.key, plain.value)
    assert decoded(chain.settings, plain) == decoded(chain.settings, bought)

    chain.name_source("")
    assert lifecycle.apply(chain.settings) == "updated"
    [plain] = chain.send(written)
    assert plain.headers.keys() == OURS
