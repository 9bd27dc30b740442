"""A sink whose target is a topic: exactly once within Kafka, wherever the process ends."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from outbox.audit import check, doctor
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config, consumer
from outbox.kafka.records import headers_of
from outbox.kafka.spec import TopicSpec
from outbox.kafka.transactions import Outgoing, Transactions
from outbox.maintenance import erase
from outbox.sink import discovery
from outbox.sink.applying.postgres import target
from outbox.sink.applying.topics import writer
from outbox.sink.decoding.decoder import DecodedEvent
from outbox.sink.decoding.records import Record as SinkRecord
from outbox.sink.remembering import fence
from outbox.sink.repair import rewind
from outbox.sink.running import plain
from outbox.sinks import TopicTarget
from outbox_lab.testing.failures import raises
from tests import items, orders
from tests.pipeline.test_check import History
from tests.support import topic_sinks
from tests.support.audit_chain import codes
from tests.support.made_events import Event, nth_key, uuid7
from tests.support.sink_driver import Database, replayed
from tests.support.sink_process import RANDOM, Publisher, catch_up_faulty
from tests.support.topic_reader import Log, Record, delete_topics, out_of_order, topic_of
from tests.support.topic_sinks import FIRED, STEPS, catch_up, copies_of, units_of
from tests.transforms import LEFT_OUT

COUNT_EVENTS = """
-- adds: 1
-- [source]
SELECT key, version AS total FROM source_totals
"""


@pytest.fixture
def targets(topic: Settings) -> Iterator[Settings]:
    """Settings of a chain with the target topics."""
    with topic_sinks.target_topics(topic):
        yield topic


def records_of(settings: Settings, name: str) -> list[Record]:
    """The records that a reader of committed ones sees."""
    with closing(Log(settings, [name])) as log:
        return log.read()


def times(records: list[Record]) -> Counter[str]:
    """By event id, how many records there are."""
    return Counter(record.id for record in records)


def once(events: list[Event]) -> Counter[str]:
    return Counter({event.event_id for event in events})


def uncommitted(settings: Settings, name: str) -> Counter[str]:
    """By event id, how many records a reader of uncommitted records sees."""
    seen = Counter[str]()
    with consumer(settings, "read_uncommitted") as client:
        ends = topics.high_watermarks(settings, name)
        client.assign([TopicPartition(name, number, 0) for number in ends])

        def is_read() -> bool:
            for message in client.consume(1000, 0.1):
                seen[dict(headers_of(message))["id"].decode()] += 1  # type: ignore[union-attr]
            places = client.position([TopicPartition(name, number) for number in ends])
            return all(place.offset >= ends[place.partition] or not ends[place.partition] for place in places)

        wait_for("all records to be read", is_read, timeout_s=30)
    return seen


def received(events: list[Event]) -> list[Event]:
    return [event for event in events if event.quantity > 0]


def test_each_event_is_written_once_with_its_key_its_headers_and_its_order(
    targets: Settings, publisher: Publisher
) -> None:
    some = publisher.events(60)
    publisher.send(some)
    publisher.send(publisher.events(20, keys=9), abort=True)
    publisher.send(some[:10])  # the relay sends them again
    catch_up(targets, "copies", "units")
    copies = records_of(targets, copies_of(targets))
    assert times(copies) == once(some)
    assert out_of_order(copies) == []
    by_id = {event.event_id: event for event in some}
    for record in copies:
        event = by_id[record.id]
        assert record.key == event.key
        assert {**json.loads(record.value), "occurred_at": 0} == {**event.payload(), "occurred_at": 0}
        assert (record.headers["eventType"], record.headers["schemaVersion"]) == (event.type, "1")
        assert (record.headers["origin"] or "").startswith(f"copies {topic_of(targets)}/")
    assert times(records_of(targets, units_of(targets))) == once(received(some))
    assert {record.key for record in records_of(targets, units_of(targets))} == {items.UNIT}
    catch_up(targets, "copies", "units")
    assert records_of(targets, copies_of(targets)) == copies


def test_another_sink_reads_what_was_written(targets: Settings, publisher: Publisher) -> None:
    sent = [orders.placed(nth_key(1), 1), orders.placed(nth_key(2), 1, unit="LTR"), orders.cancelled(nth_key(1), 2)]
    topic = topic_of(targets, "order")
    publisher.send_records(topic, sent)
    catch_up(targets, "orders")
    decoder = topic_sinks.specs(targets, "orders")[0].decoders[topic]
    copies = {one.id: one for one in records_of(targets, units_of(targets))}
    assert len(copies) == len(sent)
    for record in sent:
        event = decoder.record(record)
        assert isinstance(event, DecodedEvent)
        copy = copies[event.event_id]
        headers = [(name, (text or "").encode()) for name, text in copy.headers.items()]
        assert decoder.record(replace_value(record, headers, copy)) == event
    versions = {(one.headers["eventType"], one.headers["schemaVersion"]) for one in copies.values()}
    assert versions == {("placed", "2"), ("cancelled", "1")}


def replace_value(record: SinkRecord, headers: list[tuple[str, bytes]], copy: Record) -> SinkRecord:
    return record._replace(key=copy.key.encode(), headers=headers, value=copy.value.encode())


@pytest.mark.parametrize("step", STEPS)
def test_killed_behind_any_step_of_a_transaction_it_writes_each_event_once(
    targets: Settings, publisher: Publisher, step: str
) -> None:
    some = publisher.events(100)
    publisher.send(some)
    topic_sinks.killed(targets, step, 2, "copies", "units")
    publisher.send(some[:5])
    catch_up(targets, "copies", "units")
    assert times(records_of(targets, copies_of(targets))) == once(some)
    assert times(records_of(targets, units_of(targets))) == once(received(some))
    stable = topics.last_stable_offsets(targets, copies_of(targets))
    assert stable == topics.high_watermarks(targets, copies_of(targets)), "no transaction is open"
    if step == "produce":  # the brokers had the records
        seen = [*uncommitted(targets, copies_of(targets)).values(), *uncommitted(targets, units_of(targets)).values()]
        assert max(seen) > 1, "who reads uncommitted records sees the aborted ones too"


@pytest.mark.parametrize("step", ["send_offsets_to_transaction", "commit_transaction"])
def test_a_zombie_is_fenced(targets: Settings, publisher: Publisher, step: str) -> None:
    some = publisher.events(100)
    publisher.send(some)
    zombie = topic_sinks.start_faulty(targets, step, signal.SIGSTOP, 2, "copies")
    try:
        wait_for("the process to stand still", lambda: psutil.Process(zombie.pid).status() == "stopped", timeout_s=60)
        wait_for("nobody to have the fence", lambda: hang_up_drivers(targets), timeout_s=30)
        catch_up(targets, "copies")
        assert times(records_of(targets, copies_of(targets))) == once(some)
        zombie.send_signal(signal.SIGCONT)
        _, said = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
    assert topic_sinks.FIRED in said
    assert zombie.returncode == 1, said
    is_before = step == "send_offsets_to_transaction"
    assert ("fenced by a newer instance" in said) is is_before, said
    assert times(records_of(targets, copies_of(targets))) == once(some)


def hang_up_drivers(settings: Settings) -> bool:
    """End all connections to the sink database. Returns whether none is left."""
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE usename = current_user AND datname = current_database() AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone() == (0,)


def test_events_that_the_relay_sends_again_need_a_memory_of_ids(targets: Settings, publisher: Publisher) -> None:
    some = [event for event in publisher.events(60) if event.quantity > 0]
    publisher.send(some)
    publisher.send(some[:10])
    catch_up(targets, "units", "repeats")
    of_sink = {name: Counter[str]() for name in ("units", "repeats")}
    for record in records_of(targets, units_of(targets)):
        of_sink[(record.headers["origin"] or "").partition(" ")[0]][record.id] += 1
    assert of_sink["units"] == once(some)
    assert of_sink["repeats"] == once(some) + once(some[:10])


def test_a_rewind_writes_nothing_again(targets: Settings, publisher: Publisher) -> None:
    some = publisher.events(60)
    publisher.send(some)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "jobs", topic_sinks.jobs)
        catch_up(targets, "copies")
        assert rewind.rewind(targets, "copies", rewind.to_earliest(targets, "copies")) > 0
    lose_ids(targets, some[:20])  # so that they are new to the sink, as events that its job has not asked for
    with crash_between_commits():
        catch_up(targets, "copies")
    catch_up(targets, "copies")
    assert times(records_of(targets, copies_of(targets))) == once(some)


def test_a_sink_database_that_is_older_than_the_topic_writes_nothing_twice(
    targets: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(90)
    for part in (some[:30], some[30:60], some[60:]):
        publisher.send(part)
        catch_up(targets, "copies")
    forget(targets)
    catch_up(targets, "copies")
    assert times(records_of(targets, copies_of(targets))) == once(some)


def lose_ids(settings: Settings, events: list[Event]) -> None:
    """Let the strategy know nothing of these events."""
    with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        ids = [event.event_id for event in events]
        cursor.execute("DELETE FROM processed_events WHERE event_id = ANY(%s::uuid[])", [ids])
        assert cursor.rowcount == len(ids)


@contextmanager
def crash_between_commits() -> Iterator[None]:
    """Within the block, what writes to a topic ends when Kafka has committed, and Postgres has not."""
    commit, crashes = Transactions.commit, list[str]()

    def crash(self: Transactions, *arguments: Any) -> None:
        commit(self, *arguments)
        crashes.append(FIRED)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Transactions, "commit", crash)
        yield
    assert crashes == [FIRED]


def forget(settings: Settings) -> None:
    """Let the sink database know nothing of any sink."""
    with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("TRUNCATE sinks, positions, processed_events, checkpoint_generations, dead_letters CASCADE")


def test_offsets_that_kafka_has_forgotten_or_another_has_committed_lose_and_repeat_nothing(
    targets: Settings, publisher: Publisher
) -> None:
    some = publisher.events(90)
    publisher.send(some[:45])
    group = f"{targets.topic_prefix}.copies"
    commit_elsewhere(targets, group, 1_000)
    catch_up(targets, "copies")
    assert committed(targets, group) == Database(targets, "copies").positions()[0]
    publisher.send(some[45:])
    with crash_between_commits():
        catch_up(targets, "copies")
    admin = AdminClient(client_config(targets))
    for request in admin.delete_consumer_groups([group]).values():
        request.result(30)
    catch_up(targets, "copies")
    assert times(records_of(targets, copies_of(targets))) == once(some)


def commit_elsewhere(settings: Settings, group: str, offset: int) -> None:
    """Commit offsets of the group, as another program may have done before the sink's first start."""
    made = Consumer({**client_config(settings), "group.id": group, "enable.auto.commit": False})
    made.commit(offsets=[TopicPartition(topic_of(settings), 0, offset)], asynchronous=False)
    made.close()


def committed(settings: Settings, group: str) -> int:
    """The offset of the group in partition 0, as any client reads it."""
    client = Consumer({**client_config(settings), "group.id": group})
    [place] = client.committed([TopicPartition(topic_of(settings), 0)], 30)
    client.close()
    return int(place.offset)


def test_killed_twice_with_batches_cut_in_other_places_it_writes_each_event_once(
    targets: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "RENEWAL_S", 0)  # nothing that is in doubt is forgotten at a renewal
    some = publisher.events(60)
    publisher.send(some)
    for records in (60, 10):
        monkeypatch.setattr(plain, "PART_MAX_RECORDS", records)
        with crash_between_commits():
            catch_up(targets, "copies")
    catch_up(targets, "copies")
    assert times(records_of(targets, copies_of(targets))) == once(some)


def test_a_target_that_is_missing_or_takes_no_such_record(targets: Settings, publisher: Publisher) -> None:
    some = publisher.events(3)
    publisher.send(some)
    missing = replace(topic_sinks.jobs(targets)[0], target=TopicTarget("nowhere"))
    with raises("topic-missing"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic_sinks, "jobs", lambda _: [missing])
        catch_up(targets, "copies")
    assert Database(targets, "copies").positions() == {}
    delete_topics(targets, copies_of(targets))
    topics.create(targets, [TopicSpec(copies_of(targets), 1, {"cleanup.policy": "compact"})])
    publisher.send([replace(some[0], event_id=uuid7(RANDOM), version=99)])
    catch_up(targets, "copies")
    assert len(records_of(targets, copies_of(targets))) == 4


def test_what_its_function_fails_for_is_set_aside_and_replayed_once(targets: Settings, publisher: Publisher) -> None:
    some = publisher.events(20, keys=2)
    bad = some[4]
    publisher.send(some)
    topic_sinks.FAILS_FOR.add(bad.event_id)
    catch_up(targets, "failing")
    behind = [one for one in some if one.key == bad.key and one.version > bad.version]
    first = [one for one in some if one not in [bad, *behind]]
    name = units_of(targets)
    assert times(records_of(targets, name)) == once(first)
    letters = Database(targets, "failing").dead_letters()
    assert letters.pop(bad.event_id) == "not writable"
    assert set(letters) == {one.event_id for one in behind}
    topic_sinks.FAILS_FOR.clear()
    [spec] = topic_sinks.specs(targets, "failing")
    with crash_between_commits():
        replayed(targets, spec)
    assert set(Database(targets, "failing").statuses().values()) == {"open"}
    with target_reads() as reads:
        replayed(targets, spec, at_once=1)
    assert len(letters) > len(reads) > 0, "what the target has is not looked up for each transaction"
    assert set(Database(targets, "failing").statuses().values()) == {"replayed"}
    assert times(records_of(targets, name)) == once(some)
    assert out_of_order(records_of(targets, name)) == []


@contextmanager
def target_reads() -> Iterator[list[datetime | None]]:
    """The moments since when the target is read within the block."""
    read, moments = writer.read_written, list[datetime | None]()

    def counted(settings: Settings, sink: str, name: str, since: datetime | None = None) -> Any:
        moments.append(since)
        return read(settings, sink, name, since)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "read_written", counted)
        yield moments


ODD: list[Callable[[Any], Any]] = [
    lambda event: event._replace(key=None),
    lambda event: event._replace(key=7),
    lambda event: event._replace(key="\ud800"),
    lambda event: event._replace(payload=b"{}"),
    lambda event: event._replace(payload={"of": object()}),
    lambda event: event._replace(type="nothing"),
    lambda event: event._replace(type=["placed"]),
    lambda event: event._replace(type=items.AGGREGATE),  # which has several events
    tuple,
]


def test_what_is_no_event_is_set_aside(targets: Settings, publisher: Publisher) -> None:
    some = publisher.events(len(ODD) + 5, keys=len(ODD) + 5)
    topic_sinks.RETURNS.update({one.event_id: returned for one, returned in zip(some, ODD, strict=False)})
    others = some[len(ODD) :]
    topic_sinks.RETURNS[others[0].event_id] = lambda event: event._replace(id="another", version=None, key="")
    publisher.send(some)
    catch_up(targets, "odd")
    assert times(records_of(targets, units_of(targets))) == once(others)
    letters = Database(targets, "odd").dead_letters()
    assert letters == {one.event_id: "not writable" for one in some[: len(ODD)]}


def test_a_function_may_take_longer_than_a_transaction_may_be_idle(
    targets: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = publisher.events(30)

    def slow(event: Any) -> Any:
        time.sleep(0.1)
        return event

    topic_sinks.RETURNS.update(dict.fromkeys((event.event_id for event in some), slow))
    monkeypatch.setattr(fence, "SESSION", f"{fence.SESSION} SET idle_in_transaction_session_timeout = '2s';")
    publisher.send(some)
    catch_up(targets, "odd")
    assert times(records_of(targets, units_of(targets))) == once(some)


def test_the_commands_know_the_target(targets: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "events.sql").write_text(COUNT_EVENTS)
    job = replace(topic_sinks.jobs(targets)[0], projections=tmp_path / "projections")
    for module in (topic_sinks, discovery):
        monkeypatch.setattr(module, "jobs", lambda _: [job])
    name = copies_of(targets)
    history = History(targets)
    events = [*history.item(5, -2, 4), *history.item(7)]
    history.publish(*events[:3])
    catch_up(targets, "copies")
    history.publish(*events)  # some of them are in flight, some come again
    assert codes(check.check(targets)) == []
    catch_up(targets, "copies")
    assert codes(check.check(targets)) == []
    copy = records_of(targets, name)[0]
    headers = [(key, str(text).encode()) for key, text in copy.headers.items()]
    Transactions(targets, f"{targets.topic_prefix}.twice", 1_000_000).commit(
        name, [Outgoing(copy.key.encode(), copy.value.encode(), headers)]
    )
    report = check.check(targets)
    assert codes(report) == ["sink-drift"]
    kept = erase.remains(targets, erase.subject(targets, "item", copy.key))
    assert any(line.startswith(f"topic {name}: until 2") for line in kept)
    delete_topics(targets, name)
    assert "topic-missing" in [one.code for one in doctor.examine(targets, "sinks")]
    topics.create(targets, [TopicSpec(name, 1, {})])


def test_on_spark_it_writes_events_and_the_rows_of_a_transform(targets: Settings, publisher: Publisher) -> None:
    some = publisher.events(150)  # more than a driver reads itself
    bad, left_out = replace(some[3], quantity=13, key=nth_key(77), version=1), replace(some[4], quantity=LEFT_OUT)
    some[3:5] = [bad, left_out]
    publisher.send(some)
    done = catch_up_faulty("topic_targets", targets, "copies", "picked")
    assert done.returncode == 0, done.stderr
    assert times(records_of(targets, copies_of(targets))) == once(some)
    picked = records_of(targets, units_of(targets))
    assert times(picked) == once([one for one in some if one not in (bad, left_out)])
    assert Database(targets, "picked").dead_letters() == {bad.event_id: "transform failed"}
    assert {record.headers["eventType"] for record in picked} == {items.LESS, items.MORE} & {one.type for one in some}
    assert all(record.key == json.loads(record.value)["item_id"] for record in picked)


def test_a_record_that_the_topic_does_not_take_is_set_aside(
    topic: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = publisher.events(40, keys=2)
    large = orders.cancelled(nth_key(1), 1, "x" * 200)
    publisher.send_records(topic_of(topic, "order"), [large, orders.placed(nth_key(2), 1)])
    publisher.send(some)
    with topic_sinks.target_topics(topic, **{"max.message.bytes": "1000"}):
        catch_up(topic, "copies")
        monkeypatch.setattr(writer, "RECORD_EXTRA_BYTES", 600)
        catch_up(topic, "orders")
        assert times(records_of(topic, copies_of(topic))) == once(some)
        assert Database(topic, "orders").dead_letters() == {dict(large.headers)["id"].decode(): "not writable"}  # type: ignore[union-attr]
        assert [record.key for record in records_of(topic, units_of(topic))] == [nth_key(2)]


def test_a_producer_whose_place_another_one_has_taken_is_fenced(targets: Settings) -> None:
    name, record = copies_of(targets), Outgoing(b"key", b"{}", [])
    first = Transactions(targets, name, 1_000_000)
    first.commit(name, [record])
    second = Transactions(targets, name, 1_000_000)
    with raises("producer-fenced"):
        first.commit(name, [record])
    second.commit(name, [record])
    assert len(records_of(targets, name)) == 2


def test_a_record_that_the_brokers_refuse(targets: Settings) -> None:
    name = copies_of(targets)
    with raises("produce-refused"):
        Transactions(targets, name, 10_000_000).commit(name, [Outgoing(b"key", b"x" * 5_000_000, [])])
    Transactions(targets, name, 1_000_000).commit(name, [Outgoing(b"key", b"{}", [])])
    assert [record.value for record in records_of(targets, name)] == ["{}"]
