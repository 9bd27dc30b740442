"""`outbox check` and `outbox doctor` on real databases, a real topic and a real connector. What each kind of history
means is tested without them in tests/unit/test_audit_comparison.py.
"""

from __future__ import annotations

import itertools
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Producer

from outbox.audit import check, sinks
from outbox.audit.doctor import HOPS, Diagnosis, examine
from outbox.audit.store import TopicLogs
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import clients, topics
from outbox.kafka.clients import client_config
from outbox.maintenance import erase, retention
from outbox.migrations.declared import declared, guard
from outbox.migrations.migrate import owner_engine
from outbox.relay import connectors, lifecycle
from outbox.sink import discovery
from outbox.sink.repair import rebuild
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import outbox
from outbox_lab.testing.helpers import query
from tests.support import kept_rows, suite, topic_sinks
from tests.support.audit_chain import codes
from tests.support.declared import declare, work_for
from tests.support.made_events import DAY_MS, NOW_MS, Event, uuid7
from tests.support.outbox_rows import insert, row
from tests.support.sink_driver import sink_on
from tests.support.topic_reader import configure, delete_topics, relayed, topic_of

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


def test_a_key_that_is_erased_meanwhile_is_neither_foreign_nor_drift(
    topic: Settings, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    [kept], erased = history.item(7), history.item(5, 6)
    history.publish(kept, *erased)
    history.sink(**{kept.key: 7, erased[0].key: 11})
    read = sinks.read

    def then_erase(*arguments: Any) -> sinks.Sinks:
        found = read(*arguments)
        query(topic, "DELETE FROM items WHERE id = %s", parameters=[erased[0].key])
        erase.erase(topic, erase.subject(topic, "item", erased[0].key))
        return found

    monkeypatch.setattr(sinks, "read", then_erase)
    assert codes(check.check(topic)) == []


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


# Each hop broken on purpose: the doctor finds it, names a remedy, and continues with the next hop ---------------------


def problems(settings: Settings) -> dict[str, list[str]]:
    """The codes of the problems by hop; every hop was looked at."""
    found = list(examine(settings))
    assert {diagnosis.hop for diagnosis in found} == set(HOPS)
    by_hop: dict[str, list[str]] = {}
    for diagnosis in found:
        if not diagnosis.is_ok:
            by_hop.setdefault(diagnosis.hop, []).append(diagnosis.code)
    return by_hop


def diagnosed(settings: Settings, code: str) -> Diagnosis:
    """The diagnosis with this code."""
    (found,) = (diagnosis for diagnosis in examine(settings) if diagnosis.code == code)
    return found


@contextmanager
def changed(postgres: Postgres, do: str, undo: str, dbname: str = "postgres") -> Iterator[None]:
    postgres.psql(do, dbname)
    try:
        yield
    finally:
        postgres.psql(undo, dbname)


def test_sound_chain_has_no_problems_and_each_fault_is_found(shared_chain: Settings, postgres: Postgres) -> None:
    """One chain for every fault that can be undone: a connector costs seconds."""
    chain = shared_chain
    insert(chain, row())
    relayed(chain)
    wait_for("the slot to be read", lambda: not problems(chain), timeout_s=30)
    app, writer = chain.role_name(SourceRole.APP), chain.role_name(SinkRole.WRITER)

    with changed(postgres, f"ALTER ROLE {app} SUPERUSER", f"ALTER ROLE {app} NOSUPERUSER"):
        assert problems(chain) == {"source-db": ["role-too-wide"]}

    with changed(postgres, f"ALTER ROLE {writer} NOLOGIN", f"ALTER ROLE {writer} LOGIN"):
        [found] = [diagnosis for diagnosis in examine(chain) if not diagnosis.is_ok]
    assert (found.hop, writer in found.message) == ("sink-db", True)

    other = chain.replace(topic_retention_hours=1, topic_partitions=5, exactly_once=False)
    assert {hop: sorted(found) for hop, found in problems(other).items()} == {
        "kafka": ["partitions-differ", "topic-config-differs", "topic-config-differs"],
        "connector": ["delivery-differs"],
    }
    wider = diagnosed(other, "partitions-differ")
    assert wider.message == f"topic {topic_of(chain)} has 4 partitions, 5 are declared"
    assert "aggregate.toml, or OUTBOX_TOPIC_PARTITIONS, to 4" in str(wider.remedy)


def test_declared_events_that_were_not_migrated_or_applied_are_found(
    shared_chain: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = shared_chain
    wait_for("the slot to be read", lambda: not problems(chain), timeout_s=30)
    events = work_for(tmp_path / "newer", monkeypatch)
    shutil.copytree(suite.DOMAIN / "events", events)
    declare(events, "bill")
    declare(events, "claim", topic=f"{chain.connector}-claims")
    found = problems(chain)
    assert found == {
        "source-db": ["schema-behind", "events-undeclared"],
        "connector": ["routes-differ"],
        "kafka": ["topic-missing", "topic-missing"],
    }
    assert "bill.changed.v1, claim.changed.v1" in diagnosed(chain, "events-undeclared").message
    assert diagnosed(chain, "events-undeclared").remedy == "`outbox migrate`"
    assert diagnosed(chain, "routes-differ").remedy == "`outbox connect apply`"
    guard(owner_engine(chain, "source"), declared(chain))
    lifecycle.apply(chain)
    wait_for("no problems", lambda: not problems(chain), timeout_s=30)


def test_unread_and_missing_slots_are_found(shared_chain: Settings) -> None:
    """This test runs last, because it removes the connector."""
    lifecycle.remove(shared_chain)
    wait_for("the slot to be released", lambda: problems(shared_chain).get("slot") == ["slot-unread"], timeout_s=30)
    assert "connector-not-running" in problems(shared_chain)["connector"]
    lifecycle.remove(shared_chain, drop_slot=True)
    assert problems(shared_chain)["slot"] == ["slot-missing"]


def test_what_is_unavailable_does_not_hide_the_rest(topic: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(problems(topic))
    done = outbox("doctor", home=topic.home, **topic.as_env())
    assert (done.returncode, "problems found" in done.stderr) == (1, True)
    assert f"FIX slot      there is no slot {topic.connector}" in done.stdout
    assert "ok  source-db " in done.stdout
    with monkeypatch.context() as patched:
        patched.setattr(clients, "REQUEST_TIMEOUT_S", 1.0)  # three hops wait for a broker that never answers
        for setting, value, hops in (
            ("kafka_bootstrap", "127.0.0.1:1", {"kafka", "sinks", "retention"}),
            ("connect_url", "http://127.0.0.1:1", {"connector"}),
            ("sink_db_url", topic.sink_db_url.replace(port=1), {"sink-db", "sinks", "retention"}),
            ("source_db_url", topic.source_db_url.replace(port=1), {"source-db", "slot", "retention"}),
        ):
            assert set(problems(topic.replace(**{setting: value}))) - before == hops - before, setting
    delete_topics(topic, topic_of(topic, "order"))
    both, other = ["topic-config-differs", "topic-missing"], topic.replace(topic_retention_hours=1)
    wait_for("it to be gone", lambda: problems(other).get("kafka") == both, timeout_s=10)
    topics.create(topic, connectors.topic_specs(topic))


def test_sinks_that_do_not_run_or_are_beyond_the_topic_are_found(topic: Settings) -> None:
    item, order = (topics.describe(topic, topic_of(topic, name)) for name in ("item", "order"))
    producer = Producer(client_config(topic))
    for _ in range(3):
        producer.produce(item.name, b"{}", partition=0)
    producer.flush(30)
    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection, name="gone").begin_at({item.name: {0: 0}}, {item.name: item.id})
    assert "sinks" not in problems(topic)
    assert diagnosed(topic, "sink-undeclared").message.startswith("sink gone ")

    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at({item.name: {0: 1}}, {item.name: item.id})
        assert "sinks" not in problems(topic), "it has a driver"
        asked, watermarks = set[str](), topics.watermarks

        def before(settings: Settings, name: str) -> dict[int, tuple[int, int]]:
            """The ends of an empty topic, the first time."""
            found = watermarks(settings, name)
            is_first = name not in asked
            asked.add(name)
            return dict.fromkeys(found, (0, 0)) if is_first else found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topics, "watermarks", before)
            assert [one for one in examine(topic, "sinks") if not one.is_ok] == [], "it goes on meanwhile"
        with rebuild.reserved(topic, "dedup") as owner:
            rebuild.begin(owner, "dedup", [item], {item.name: topics.first_offsets(topic, item.name)})
            assert problems(topic)["sinks"] == ["rebuild-unfinished"]
            rebuild.drop_copy(owner, "dedup")
    wait_for("the driver to be gone", lambda: "sinks" in problems(topic), timeout_s=10)
    assert problems(topic)["sinks"] == ["sink-not-running"]
    assert "2 offsets behind" in diagnosed(topic, "sink-not-running").message
    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at({item.name: {0: 9}}, {item.name: item.id})
        assert problems(topic)["sinks"] == ["topic-recreated"]
        kept_rows.stand(topic, "activity", item.name, item.id)
        kept_rows.stand(topic, "activity", order.name, order.id, offset=7)
        assert any(f"offset 7 of {order.name}, partition 0" in one.message for one in examine(topic, "sinks"))
        less = 'UPDATE sinks SET asked_for = \'{"strategy": "dedup", "topics": {}}\' WHERE name = \'activity\''
        kept_rows.query(topic, less)
        kept_rows.query(topic, "INSERT INTO skipped_events VALUES ('activity', %s, 'order.placed.v1')", order.name)
        assert diagnosed(topic, "job-changed").message.startswith("sink activity")


@pytest.mark.usefixtures("whole_day")
def test_unlimited_topic_and_too_old_outbox_are_found(topic: Settings, postgres: Postgres) -> None:
    old = uuid7(RANDOM, NOW_MS - 9 * DAY_MS)
    columns = "id, aggregatetype, aggregateid, type, payload"
    insert_old = f"INSERT INTO outbox ({columns}) VALUES ('{old}', 'item', 'b', 'received', '{{}}')"
    postgres.psql(insert_old, topic.source_db_url.name)
    assert "retention" not in problems(topic)
    retention.drop(topic, datetime.now(UTC).date() - timedelta(days=5))
    assert problems(topic)["retention"] == ["outbox-older-than-horizon"]
    configure(topic, topic_of(topic, "order"), "retention.ms", "-1")
    both = ["outbox-older-than-horizon", "topic-unlimited"]
    wait_for("the topic to be unlimited", lambda: problems(topic)["retention"] == both, timeout_s=10)
    assert topic_of(topic, "order") in diagnosed(topic, "topic-unlimited").message


@pytest.mark.parametrize(("dated_by", "found"), [("CreateTime", ["topic-config-differs"]), ("LogAppendTime", [])])
def test_a_target_topic_that_the_clock_of_the_sink_dates_is_found(
    topic: Settings, monkeypatch: pytest.MonkeyPatch, dated_by: str, found: list[str]
) -> None:
    jobs = topic_sinks.jobs(topic)
    monkeypatch.setattr(discovery, "jobs", lambda _: jobs)
    with topic_sinks.target_topics(topic, **{"message.timestamp.type": dated_by}):
        kept_rows.start(topic, "copies")
        assert problems(topic).get("sinks", []) == found
        remedies = [str(one.remedy) for one in examine(topic, "sinks") if not one.is_ok]
    assert all(f"{topic_sinks.copies_of(topic)} --add-config message.timestamp.type=" in one for one in remedies)
