"""`outbox check` on real databases and a real topic. What each kind of history means is tested without them in
tests/unit/test_audit_comparison.py.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from confluent_kafka import Producer

from outbox.audit import check, sinks
from outbox.audit.store import TopicLogs
from outbox.base.settings import Settings, SinkRole
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import outbox
from outbox_lab.testing.helpers import query
from tests.support import kept_rows
from tests.support.audit_chain import codes
from tests.support.made_events import NOW_MS, Event, uuid7
from tests.support.topic_reader import topic_of

SINK = "dedup"
RANDOM = Random(44)  # noqa: S311
WRITE = """
INSERT INTO outbox (id, aggregatetype, aggregateid, type, schema_version, payload) VALUES (%s, %s, %s, %s, %s, %s)
"""
STAND = """
INSERT INTO positions (sink, topic, partition, topic_id, next_offset) VALUES (%s, %s, %s, 'x', %s)
ON CONFLICT (sink, topic, partition) DO UPDATE SET next_offset = excluded.next_offset
"""
HOLD = """
INSERT INTO stock (sink, item_id, unit, stock, version, events) VALUES (%s, %s, 'KGM', %s, 1, 1)
ON CONFLICT (sink, item_id) DO UPDATE SET stock = excluded.stock
"""
SET_ASIDE = """
INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", key, headers, value, event_id, is_event,
                          version, reason, detail, status, resolution)
VALUES (%s, %s, %s, 'x', 0, %s, %s, %s, %s, %s, %s, %s, 'test', '', %s, %s)
"""


class History:
    """Writes source, topic and sink directly, each as the test wants it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.topic = topic_of(settings)
        self._producer = Producer({**client_config(settings), "transactional.id": f"history-{uuid.uuid4()}"})
        self._producer.init_transactions(30)

    def item(self, *quantities: int) -> list[Event]:
        """An item of the source with an event in the outbox per quantity, with the versions 1, 2, 3."""
        key = str(uuid.uuid4())
        insert = "INSERT INTO items (id, unit, stock, version) VALUES (%s, 'KGM', %s, %s)"
        query(self._settings, insert, parameters=[key, sum(quantities), len(quantities)])
        events = [Event(uuid7(RANDOM), key, *one) for one in zip(quantities, itertools.count(1), strict=False)]
        for event in events:
            self._write(event.event_id, "item", key, event.type, 1, event.payload())
        return events

    def order(self) -> None:
        """An order of the source with an event of each version in the outbox."""
        order = str(uuid.uuid4())
        query(self._settings, "INSERT INTO orders (id, version) VALUES (%s, 2)", parameters=[order])
        payload = {"order_id": order, "item_id": order, "quantity": 1, "occurred_at": "2026-11-21T10:00:00.123456Z"}
        for version, more in ((2, {"unit": "KGM", "version": 1}), (1, {"version": 2})):
            self._write(uuid7(RANDOM), "order", order, "placed", version, {**payload, **more})

    def _write(self, *row: object) -> None:
        query(self._settings, WRITE, parameters=[*row[:-1], json.dumps(row[-1])])

    def publish(self, *events: Event, committed: bool = True, **changed: Any) -> None:
        """Put events on the topic, in one transaction; ``changed`` are properties that differ."""
        self._producer.begin_transaction()
        for event in events:
            value = json.dumps({**event.payload(), **changed})
            self._producer.produce(self.topic, value, event.key, headers=[*event.record.headers], partition=0)
        if committed:
            self._producer.commit_transaction(30)
        else:
            self._producer.flush()
            self._producer.abort_transaction(30)

    def sink(self, next_offset: int | None = None, **totals: int) -> None:
        """A sink that has read so far (default: all of the topic) and has these totals by item."""
        end = topics.last_stable_offsets(self._settings, self.topic)
        if next_offset is not None:
            end[0] = next_offset
        kept_rows.start(self._settings, SINK)
        with kept_rows.cursor_of(self._settings, SinkRole.OWNER) as cursor:
            cursor.executemany(STAND, [(SINK, self.topic, *place) for place in end.items()])
            cursor.executemany(HOLD, [(SINK, *total) for total in totals.items()])

    def set_aside(
        self, event: Event, offset: int, *, is_valid: bool = True, because: str | None = None, sink: str = SINK
    ) -> None:
        """A sink's dead letter of an event that stands at this offset; discarded if ``because`` says why."""
        headers = [{"key": name, "value": (text or b"").decode()} for name, text in event.record.headers]
        letter = [
            *(sink, event.event_id, self.topic, offset, event.key.encode(), json.dumps(headers), event.record.value),
            *(event.event_id, is_valid, event.version if is_valid else None),
            *("discarded" if because else "open", because),
        ]
        kept_rows.query(self._settings, SET_ASIDE, *letter)


@pytest.fixture
def history(topic: Settings) -> History:
    return History(topic)


def test_markers_and_aborted_records_are_not_counted(topic: Settings, history: History) -> None:
    first, second = history.item(5, -2, 4), history.item(7)
    history.publish(first[0], second[0])
    history.publish(*first[1:], committed=False)  # sent again below, as Connect does after an abort
    history.publish(*first[1:])
    history.sink(**{first[0].key: 7, second[0].key: 7})
    report = check.check(topic)
    assert (report.records, report.duplicates, report.in_flight) == (4, 0, 0)
    assert (codes(report), report.settled) == ([], True)


def test_a_sink_that_no_job_declares_is_not_counted(topic: Settings, history: History, postgres: Postgres) -> None:
    events = history.item(5, 6, 7)
    history.publish(*events)
    history.sink(next_offset=1, **{events[0].key: 1000})
    history.set_aside(events[0], 0)
    assert codes(check.check(topic)) == ["sink-drift", "sink-parked"]
    rename = "UPDATE sinks SET name = 'gone'"
    for table in ("positions", "stock", "dead_letters"):
        rename += f"; UPDATE {table} SET sink = 'gone'"
    postgres.psql(rename, topic.sink_db_url.name)
    report = check.check(topic, incremental=True)
    assert (codes(report), report.settled) == ([], True)
    assert report.sink("gone").not_compared == sinks.UNDECLARED
    assert check.check(topic, incremental=True).records == 0, "its positions hold nothing back"


def test_a_discard_is_acknowledged(topic: Settings, history: History) -> None:
    events = history.item(5, 6, 7)
    history.publish(*events)
    stranger = Event(uuid7(RANDOM, NOW_MS + 60_000), events[0].key, 5, 999_999_943)  # the source never wrote it
    history.publish(stranger, quantity="five")
    history.sink(**{events[0].key: 12})
    history.set_aside(events[1], 1, because="test data")
    history.set_aside(stranger, 4, is_valid=False, because="not ours")
    for records in (4, 0):
        report = check.check(topic, incremental=True)
        assert (codes(report), report.settled, report.records) == ([], True, records)
        assert report.sink(SINK).discarded == {"not ours": 1, "test data": 1}
        assert report.acknowledged == (records == 4)
    history.set_aside(stranger, 4, is_valid=False, sink="naive")
    kept_rows.start(topic, "naive")
    assert "malformed-records" in codes(check.check(topic)), "it is open in another sink"


def test_topics_are_read_together_and_reported_each(topic: Settings, history: History) -> None:
    events = history.item(5, 6)
    history.order()
    history.publish(*events)
    history.sink(**{events[0].key: 11})
    report = check.check(topic)
    assert (report.settled, report.in_flight) == (False, 2)
    orders = topic_of(topic, "order")
    assert [(one.name, one.records, one.in_flight) for one in report.topics] == [(history.topic, 2, 0), (orders, 0, 2)]
    assert report.sink(SINK).in_flight == 0, "it asks for items alone"

    kept_rows.stand(topic, "orders", orders, "x")
    kept_rows.stand(topic, "activity", history.topic, "x", offset=1)
    report = check.check(topic)
    assert (report.sink("orders").in_flight, report.sink("activity").in_flight) == (2, 1 + 2)
    assert report.sink("orders").comparison("orders").not_compared.startswith("not now")
    assert report.sink("activity").drift == {events[0].key: -1}, "one of its two events is lost"


@pytest.mark.parametrize("incremental", [False, True])
def test_what_goes_on_between_two_readings_is_in_flight(
    topic: Settings, history: History, monkeypatch: pytest.MonkeyPatch, incremental: bool
) -> None:
    """Sinks are read first, then the topics, and the source last: what was applied is on the topic that was read."""

    def go_on() -> None:
        [event] = history.item(7)
        history.publish(event)
        history.sink(**{event.key: 7})

    def then_go_on(read: Callable[..., Any]) -> Callable[..., Any]:
        def reading(*arguments: Any) -> Any:
            found = read(*arguments)
            go_on()
            return found

        return reading

    monkeypatch.setattr(sinks, "read", then_go_on(sinks.read))
    monkeypatch.setattr(TopicLogs, "read_on", then_go_on(TopicLogs.read_on))
    go_on()
    for _ in range(2):
        report = check.check(topic, incremental=incremental)
        assert (codes(report), report.settled) == ([], False)


def test_an_incremental_check_reads_what_came_since(
    topic: Settings, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    records_read, read_on = list[int](), TopicLogs.read_on

    def counting(self: TopicLogs, *arguments: Any) -> None:
        before = self.records
        read_on(self, *arguments)
        records_read.append(self.records - before)

    monkeypatch.setattr(TopicLogs, "read_on", counting)
    first, second = history.item(5, 6), history.item(7)
    history.publish(*first)
    history.sink(**{first[0].key: 11, second[0].key: 0})
    in_flight = check.check(topic, incremental=True)
    assert (codes(in_flight), in_flight.in_flight) == ([], 1)

    history.publish(*second)
    history.sink(**{second[0].key: 7})
    found = check.check_settled(topic, timeout_s=10, incremental=True)
    assert (codes(found), found.settled, found.records) == ([], True, 1)
    check.check(topic, incremental=True)
    check.check(topic)
    assert records_read == [2, 1, 0, 3], "a full check begins at the beginning"

    history.publish(first[0])
    report = check.check(topic, incremental=True)
    assert (codes(report), report.duplicates) == ([], 1)
    assert records_read[4:] == [1, 4]
    assert [note for note in report.notes if "everything was read" in note], "it was in doubt"


def test_a_wait_in_vain_reports_how_far_each_topic_and_sink_is(topic: Settings, history: History) -> None:
    first, second, third, _ = history.item(5, 6, 7, 8)
    history.publish(first, second)
    history.publish(third, quantity="7")
    history.sink(next_offset=1, **{first.key: 5})
    done = outbox("check", "--wait", "1", "--json", home=topic.home, **topic.as_env())
    report = json.loads(done.stdout)
    assert (done.returncode, report["settled"], report["total"]["in_flight"]) == (1, False, 1)
    assert {one["name"]: one["in_flight"] for one in report["sinks"]} == {"dedup": 3}
    *_, line = done.stderr.splitlines()  # a slow one has said how far it is
    assert f"topic {topic_of(topic)} lacks 1 event" in line
    assert "sink dedup is 3 events behind" in line
    assert [finding["code"] for finding in report["findings"]] == ["malformed-records"]
    assert report["topics"][0]["malformed"] == {"schema violation": 1}
    described = outbox("check", "--help", home=topic.home).stdout
    for part in (report, report["topics"][0], report["sinks"][0], report["sinks"][0]["comparisons"][0]):
        assert [key for key in part if key not in described] == []
