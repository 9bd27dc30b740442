"""Sinks whose target is a topic, exactly once within Kafka wherever the process ends, or a function; and handlers."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Literal
from unittest.mock import Mock

import psutil
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # missing in its stubs
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from outbox.audit import check, doctor
from outbox.base.database import connect, query
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.handlers import handler
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.kafka.spec import TopicSpec
from outbox.kafka.transactions import Outgoing, Transactions
from outbox.maintenance import erase
from outbox.sink import discovery
from outbox.sink.applying import topic_writer
from outbox.sink.applying.handlers.handler import Handler
from outbox.sink.applying.postgres import target
from outbox.sink.repair import rewind
from outbox.sink.running import plain, supervisor
from outbox.sink.running.plain import plain_engine
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.kafka import CLIENT
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from outbox_lab.testing.homes import Homes
from tests import items, orders, targets
from tests.pipeline.test_audit import History
from tests.support import topic_sinks
from tests.support.audit_chain import codes
from tests.support.made_events import Event, nth_key, sums, uuid7
from tests.support.paths import ROOT
from tests.support.secured import guarded_kafka
from tests.support.sink_driver import Database, replayed
from tests.support.sink_process import (
    RANDOM,
    TIMEOUT_S,
    Publisher,
    catch_up_faulty,
    logged,
    reported_failure,
    run_faulty,
)
from tests.support.topic_reader import Log, Record, delete_topics, out_of_order, topic_of
from tests.support.topic_sinks import FIRED, STEPS, catch_up, copies_of, units_of
from tests.transforms import LEFT_OUT

COUNT_EVENTS = """
-- adds: 1
-- [source]
SELECT key, version AS total FROM source_totals
"""


@pytest.fixture
def chain(topic: Settings) -> Iterator[Settings]:
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


def test_each_event_is_written_once_with_key_headers_and_order(chain: Settings, publisher: Publisher) -> None:
    some = [replace(one, quantity=one.quantity * (-1) ** number) for number, one in enumerate(publisher.events(60))]
    publisher.send(some)
    publisher.send(publisher.events(20, keys=9), abort=True)
    publisher.send(some[:10])  # the relay sends them again
    catch_up(chain, "copies", "units", "repeats")
    copies = records_of(chain, copies_of(chain))
    assert times(copies) == once(some)
    assert out_of_order(copies) == []
    by_id = {event.event_id: event for event in some}
    for record in copies:
        event = by_id[record.id]
        assert record.key == event.key
        assert {**json.loads(record.value), "occurred_at": 0} == {**event.payload(), "occurred_at": 0}
        assert (record.headers["eventType"], record.headers["schemaVersion"]) == (event.type, "1")
        assert (record.headers["origin"] or "").startswith(f"copies {topic_of(chain)}/")
    by_unit = records_of(chain, units_of(chain))
    assert {record.key for record in by_unit} == {items.UNIT}
    of_units = [one for one in by_unit if (one.headers["origin"] or "").startswith("units ")]
    more, again = ([one for one in few if one.quantity > 0] for few in (some, some[:10]))
    assert times(of_units) == once(more)
    assert times(by_unit) - times(of_units) == once(more) + once(again), "`offsets` does not know them by id"
    catch_up(chain, "copies", "units")
    assert records_of(chain, copies_of(chain)) == copies


def test_another_sink_reads_what_was_written(chain: Settings, publisher: Publisher) -> None:
    sent = [orders.placed(nth_key(1), 1), orders.placed(nth_key(2), 1, unit="LTR"), orders.cancelled(nth_key(1), 2)]
    topic = topic_of(chain, "order")
    publisher.send_records(topic, sent)
    catch_up(chain, "orders")
    decoder = topic_sinks.specs(chain, "orders")[0].decoders[topic]
    copies = {one.id: one for one in records_of(chain, units_of(chain))}
    assert len(copies) == len(sent)
    for record in sent:
        copy = copies[(dict(record.headers)["id"] or b"").decode()]
        headers = [(name, (text or "").encode()) for name, text in copy.headers.items()]
        again = record._replace(key=copy.key.encode(), value=copy.value.encode(), headers=headers)
        assert decoder.record(again) == decoder.record(record)
    versions = {(one.headers["eventType"], one.headers["schemaVersion"]) for one in copies.values()}
    assert versions == {("placed", "2"), ("cancelled", "1")}


@pytest.mark.parametrize("step", STEPS)
def test_killed_behind_any_step_of_a_transaction(chain: Settings, publisher: Publisher, step: str) -> None:
    some = publisher.events(100)
    publisher.send(some)
    topic_sinks.killed(chain, step, 2, "copies", "units")
    publisher.send(some[:5])
    catch_up(chain, "copies", "units")
    assert times(records_of(chain, copies_of(chain))) == once(some)
    assert times(records_of(chain, units_of(chain))) == once(some)
    stable = topics.last_stable_offsets(chain, copies_of(chain))
    assert stable == topics.high_watermarks(chain, copies_of(chain)), "no transaction is open"


@pytest.mark.parametrize("step", ["send_offsets_to_transaction", "commit_transaction"])
def test_a_zombie_is_fenced(chain: Settings, publisher: Publisher, step: str) -> None:
    some = publisher.events(100)
    publisher.send(some)
    zombie = topic_sinks.start_faulty(chain, step, signal.SIGSTOP, 2, "copies")
    try:
        wait_for("the process to stand still", lambda: psutil.Process(zombie.pid).status() == "stopped", timeout_s=60)
        wait_for("nobody to have the fence", lambda: hang_up_drivers(chain), timeout_s=30)
        catch_up(chain, "copies")
        assert times(records_of(chain, copies_of(chain))) == once(some)
        zombie.send_signal(signal.SIGCONT)
        _, said = zombie.communicate(timeout=60)
    finally:
        zombie.kill()
    assert topic_sinks.FIRED in said
    assert zombie.returncode == 1, said
    assert ("fenced by a newer instance" in said) is (step == "send_offsets_to_transaction"), said
    assert times(records_of(chain, copies_of(chain))) == once(some)


def hang_up_drivers(settings: Settings) -> bool:
    """End all connections to the sink database. Returns whether none is left."""
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE usename = current_user AND datname = current_database() AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone() == (0,)


def rewound(settings: Settings, some: list[Event], _: pytest.MonkeyPatch) -> None:
    """The sink is rewound, and knows nothing of some events, as if its job had not asked for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "jobs", topic_sinks.jobs)
        assert rewind.rewind(settings, "copies", rewind.to_earliest(settings, "copies")) > 0
    with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        ids = [event.event_id for event in some[:20]]
        cursor.execute("DELETE FROM processed_events WHERE event_id = ANY(%s::uuid[])", [ids])
        assert cursor.rowcount == len(ids)
    with crash_between_commits():
        catch_up(settings, "copies")


def lost_database(settings: Settings, *_: object) -> None:
    """The sink database knows nothing of any sink."""
    with closing(connect(settings, SinkRole.OWNER)) as owner, owner, owner.cursor() as cursor:
        cursor.execute("TRUNCATE sinks, positions, processed_events, checkpoint_generations, dead_letters CASCADE")


def lost_offsets(settings: Settings, *_: object) -> None:
    """Kafka has forgotten the group's offsets."""
    admin = AdminClient(client_config(settings))
    for request in admin.delete_consumer_groups([f"{settings.topic_prefix}.copies"]).values():
        request.result(30)


def foreign_offsets(settings: Settings, *_: object) -> None:
    """Another program has committed offsets in the name of the group."""
    group = {"group.id": f"{settings.topic_prefix}.copies", "enable.auto.commit": False}
    with closing(Consumer(client_config(settings) | group)) as another:
        another.commit(offsets=[TopicPartition(topic_of(settings), 0, 1_000)], asynchronous=False)


def killed_again(settings: Settings, _: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink is killed at the same place, with its batches cut in other places."""
    monkeypatch.setattr(target, "RENEWAL_S", 0)  # nothing that is in doubt is forgotten at a renewal
    monkeypatch.setattr(plain, "PART_MAX_RECORDS", 10)
    with crash_between_commits():
        catch_up(settings, "copies")


@pytest.mark.parametrize(
    "disturb", [rewound, lost_database, lost_offsets, foreign_offsets, killed_again], ids=lambda one: one.__name__
)
def test_what_the_target_has_is_not_written_again(
    chain: Settings,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    disturb: Callable[[Settings, list[Event], pytest.MonkeyPatch], None],
) -> None:
    some = publisher.events(90)
    publisher.send(some[:45])
    catch_up(chain, "copies")
    publisher.send(some[45:])
    with crash_between_commits():
        catch_up(chain, "copies")
    disturb(chain, some, monkeypatch)
    catch_up(chain, "copies")
    assert times(records_of(chain, copies_of(chain))) == once(some)


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


def test_what_its_function_fails_for_is_set_aside_and_replayed_once(
    chain: Settings, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = publisher.events(20, keys=2)
    bad = some[4]
    publisher.send(some)
    topic_sinks.RETURNS[bad.event_id] = lambda event: event._replace(key=event.payload["missing"])
    catch_up(chain, "odd")
    behind = [one for one in some if one.key == bad.key and one.version > bad.version]
    first = [one for one in some if one not in [bad, *behind]]
    name, database = units_of(chain), Database(chain, "odd")
    assert times(records_of(chain, name)) == once(first)
    letters = dict.fromkeys((one.event_id for one in behind), "parked") | {bad.event_id: "not writable"}
    assert database.dead_letters() == letters
    topic_sinks.RETURNS.clear()
    [spec] = topic_sinks.specs(chain, "odd")
    with crash_between_commits():
        replayed(chain, spec)
    assert set(database.statuses().values()) == {"open"}
    reads = Mock(wraps=topic_writer.read_written)
    monkeypatch.setattr(topic_writer, "read_written", reads)
    replayed(chain, spec, at_once=1)
    assert len(letters) > reads.call_count > 0, "what the target has is not looked up for each transaction"
    assert set(database.statuses().values()) == {"replayed"}
    assert times(records_of(chain, name)) == once(some)
    assert out_of_order(records_of(chain, name)) == []


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


def test_what_is_no_event_is_set_aside(chain: Settings, publisher: Publisher) -> None:
    some = publisher.events(len(ODD) + 5, keys=len(ODD) + 5)
    topic_sinks.RETURNS.update({one.event_id: returned for one, returned in zip(some, ODD, strict=False)})
    others = some[len(ODD) :]
    topic_sinks.RETURNS[others[0].event_id] = lambda event: event._replace(id="another", version=None, key="")
    publisher.send(some)
    catch_up(chain, "odd")
    assert times(records_of(chain, units_of(chain))) == once(others)
    letters = Database(chain, "odd").dead_letters()
    assert letters == {one.event_id: "not writable" for one in some[: len(ODD)]}


def test_the_commands_know_the_target(chain: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "comparisons").mkdir()
    (tmp_path / "comparisons" / "events.sql").write_text(COUNT_EVENTS)
    job = replace(topic_sinks.jobs(chain)[0], projections=tmp_path / "projections")
    for module in (topic_sinks, discovery):
        monkeypatch.setattr(module, "jobs", lambda _: [job])
    name = copies_of(chain)
    history = History(chain)
    events = [*history.item(5, -2, 4), *history.item(7)]
    history.publish(*events[:3])
    catch_up(chain, "copies")
    history.publish(*events)  # some of them are in flight, some come again
    assert codes(check.check(chain)) == []
    catch_up(chain, "copies")
    copy = records_of(chain, name)[0]
    headers = [(key, str(text).encode()) for key, text in copy.headers.items()]
    Transactions(chain, f"{chain.topic_prefix}.twice", 1_000_000).commit(
        name, [Outgoing(copy.key.encode(), copy.value.encode(), headers)]
    )
    assert codes(check.check(chain)) == ["sink-drift"]
    kept = erase.remains(chain, erase.subject(chain, "item", copy.key))
    assert any(line.startswith(f"topic {name}: until 2") for line in kept)
    delete_topics(chain, name)
    assert "topic-missing" in [one.code for one in doctor.examine(chain, "sinks")]
    topics.create(chain, [TopicSpec(name, 1, {})])


def test_check_does_not_look_for_what_a_replay_has_left_out(chain: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    job = next(job for job in topic_sinks.jobs(chain) if job.name == "odd")
    monkeypatch.setattr(discovery, "jobs", lambda _: [job])
    history = History(chain)
    events = history.item(5, -2)
    monkeypatch.setitem(topic_sinks.RETURNS, events[1].event_id, tuple)
    history.publish(*events)
    catch_up(chain, "odd")
    assert codes(check.check(chain)) == ["sink-parked"]
    monkeypatch.setitem(topic_sinks.RETURNS, events[1].event_id, lambda _: None)
    [spec] = topic_sinks.specs(chain, "odd")
    replayed(chain, spec)
    assert Database(chain, "odd").statuses() == {events[1].event_id: "replayed"}
    assert codes(check.check(chain)) == []


def test_on_spark_it_writes_events_and_the_rows_of_a_transform(chain: Settings, publisher: Publisher) -> None:
    some = publisher.events(150)  # more than a driver reads itself
    bad, left_out = replace(some[3], quantity=13, key=nth_key(77), version=1), replace(some[4], quantity=LEFT_OUT)
    some[3:5] = [bad, left_out]
    publisher.send(some)
    done = catch_up_faulty("topic_targets", chain, "copies", "picked")
    assert done.returncode == 0, done.stderr
    assert times(records_of(chain, copies_of(chain))) == once(some)
    picked = records_of(chain, units_of(chain))
    assert times(picked) == once([one for one in some if one not in (bad, left_out)])
    assert Database(chain, "picked").dead_letters() == {bad.event_id: "transform failed"}
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
        monkeypatch.setattr(topic_writer, "RECORD_EXTRA_BYTES", 600)
        catch_up(topic, "orders")
        assert times(records_of(topic, copies_of(topic))) == once(some)
        assert Database(topic, "orders").dead_letters() == {dict(large.headers)["id"].decode(): "not writable"}  # type: ignore[union-attr]
        assert [record.key for record in records_of(topic, units_of(topic))] == [nth_key(2)]
        with raises("produce-refused"):  # by the brokers
            Transactions(topic, "any", 10_000_000).commit(units_of(topic), [Outgoing(b"key", b"x" * 5_000_000, [])])


# Rights -------------------------------------------------------------------------------------------------------------

PREFIXED = "groups that begin with"
TYPES = {
    "topic": ResourceType.TOPIC,
    "transactional id": ResourceType.TRANSACTIONAL_ID,
    "group": ResourceType.GROUP,
    PREFIXED: ResourceType.GROUP,
}
KAFKA = ("bootstrap", "security_protocol", "sasl_mechanism", "username", "password", "cafile")


def rights(settings: Settings) -> list[AclBinding]:
    """What docs/topics.md lists, and what reading the topic of the events needs, one operation each."""
    page = (ROOT / "docs" / "topics.md").read_text()
    name = f"{settings.topic_prefix}.copies"
    names = {"topic": [copies_of(settings)], "transactional id": [name, f"{name}.replay"], "group": [name]}
    names[PREFIXED] = ["outbox-"]
    rows = re.findall(rf"^\| (topic|transactional id|group|{PREFIXED}) \| .* \| (`.*`) \|$", page, re.M)
    found = [
        right(kind, one, word)
        for kind, operations in rows
        for one in names[kind]
        for word in re.findall(r"`(\w+)`", operations)
    ]
    return found + [right("topic", topic_of(settings), word) for word in ("Read", "Describe")]


def right(kind: str, name: str, operation: str) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if kind == PREFIXED else ResourcePatternType.LITERAL
    which = AclOperation["DESCRIBE_CONFIGS" if operation == "DescribeConfigs" else operation.upper()]
    return AclBinding(TYPES[kind], name, pattern, f"User:{CLIENT}", "*", which, AclPermissionType.ALLOW)


def test_a_sink_needs_the_rights_of_the_page(databases: Settings, homes: Homes) -> None:
    with guarded_kafka(homes.new("rights")) as both:
        settings, administrator = (
            databases.replace(**{f"kafka_{name}": getattr(one, f"kafka_{name}") for name in KAFKA}) for one in both
        )
        topics.create(administrator, [TopicSpec(topic_of(settings), 1, {})])
        some = [Event(uuid7(RANDOM), nth_key(1), 1 + number, 1 + number) for number in range(2)]
        name = f"{settings.topic_prefix}.copies"
        with topic_sinks.target_topics(administrator):
            publisher, admin = Publisher(administrator), AdminClient(client_config(administrator))
            granted = rights(settings)
            assert len(granted) == 13
            wait_all(admin.create_acls(granted))
            publisher.send(some[:1])
            catch_up(settings, "copies")
            publisher.send(some[1:])
            for one in (
                right("topic", copies_of(settings), "Write"),
                right("topic", copies_of(settings), "DescribeConfigs"),
                right("transactional id", name, "Write"),
                right("group", name, "Read"),
            ):
                wait_all(admin.delete_acls([filter_of(one)]))
                with raises("kafka-not-authorized"):
                    catch_up(settings, "copies")
                wait_all(admin.create_acls([one]))
            catch_up(settings, "copies")
            assert times(records_of(administrator, copies_of(settings))) == once(some)
            wait_all(admin.delete_acls([filter_of(right("topic", copies_of(settings), "Write"))]))
            with raises("kafka-not-authorized"):
                Transactions(settings, name, 1_000_000).commit(copies_of(settings), without_end())


def without_end() -> Iterator[Outgoing]:
    """Records until the answer of the brokers ends the transaction."""
    while True:
        yield Outgoing(b"key", b"{}", [])
        time.sleep(0.01)


def filter_of(one: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        one.restype, one.name, one.resource_pattern_type, one.principal, one.host, one.operation, one.permission_type
    )


def wait_all(requests: Mapping[Any, Future[Any]]) -> None:
    for request in requests.values():
        request.result(30)


# Functions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place that the functions write to."""
    monkeypatch.setenv(targets.FILE, str(tmp_path / "target.db"))
    return tmp_path / "target.db"


def test_a_kill_between_the_function_and_the_commit_repeats_nothing(
    topic: Settings, publisher: Publisher, database: Database, file: Path
) -> None:
    sent: list[Event] = []
    for names in (["--plain", "dedup"], ["dedup"]):
        finish = partial(catch_up_faulty, "function_target", topic, *names, is_alone="--plain" in names)
        some = publisher.events(300)
        publisher.send(some[:100])
        first = finish()
        assert first.returncode == 0, first.stderr
        publisher.send([*some[100:], *some[:10]])
        before = database.positions()
        killed = catch_up_faulty("death_behind_a_function", topic, *names, is_alone=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert database.positions() == before
        assert targets.found() != sums([*sent, *some[:100]]), "it has written"
        last = finish()
        assert last.returncode == 0, last.stderr
        sent += some
        assert targets.found() == sums(sent)
        [*_, applied] = logged(last, "applied")
        assert database.applied() == len(sent), applied
    file.unlink()
    rebuilt = run_faulty("function_target", topic, "rebuild", "dedup", "--from", "topic", "--yes")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert targets.found() == sums(sent), "a new place is filled from the topic"
    assert database.applied() == len(sent)


@pytest.mark.usefixtures("file")
def test_a_function_gets_rows_of_the_transform(topic: Settings, publisher: Publisher, database: Database) -> None:
    some = publisher.events(150)
    hidden = [replace(one, quantity=LEFT_OUT) for one in publisher.events(5)]
    failing = [replace(one, quantity=targets.THIRTEEN) for one in publisher.events(1)]
    publisher.send([*some, *hidden, *failing])
    done = catch_up_faulty("function_behind_transform", topic, "dedup")
    assert done.returncode == 0, done.stderr
    assert targets.found() == sums(some)
    assert database.dead_letters() == {failing[0].event_id: "transform failed"}


# Handlers: `outbox handle` --------------------------------------------------------------------------------------------

HANDLER, PARALLEL = "item_receipts", "item_notices"
RECEIPTS = "SELECT event_id::text, key, version FROM handled_events WHERE handler = %s ORDER BY key, place"


def receipts(settings: Settings, name: str = HANDLER) -> list[tuple[object, ...]]:
    return Database(settings).query(RECEIPTS, name)


@contextmanager
def handling(settings: Settings, *names: str) -> Iterator[SinkProcess]:
    process = SinkProcess(f"handle-{settings.topic_prefix}", settings, ["handle", *names])
    process.start_timeout_s = TIMEOUT_S
    process.spawn()
    try:
        yield process
    finally:
        process.kill()


def wait_handled(process: SinkProcess, settings: Settings, count: int, name: str = HANDLER) -> None:
    def handled() -> bool:
        assert process.is_running(), process.tail()
        return len(receipts(settings, name)) >= count

    wait_for(f"{count} events to be handled", handled, timeout_s=TIMEOUT_S)


def test_killed_while_calls_fail_it_handles_each_event_once_in_order(topic: Settings, publisher: Publisher) -> None:
    sent: list[Event] = []
    change(
        topic,
        "ALTER TABLE handled_events ADD CONSTRAINT forbidden CHECK (version % 7 <> 3 OR key !~ '[123]$') NOT VALID",
    )
    for _ in range(5):
        some = publisher.events(200, keys=20)
        sent += some
        with handling(topic, PARALLEL) as process:
            for begin in range(0, 200, 20):
                publisher.send(some[begin : begin + 20])
            wait_handled(process, topic, len(receipts(topic, PARALLEL)) + RANDOM.randrange(1, 20), PARALLEL)
    database = Database(topic, PARALLEL)
    assert {"handler failed", "parked"} <= {*database.dead_letters().values()}
    change(topic, "ALTER TABLE handled_events DROP CONSTRAINT forbidden")
    with handling(topic, PARALLEL) as process:
        wait_handled(process, topic, len(sent), PARALLEL)
    due = [(one.event_id, one.key, one.version) for one in sorted(sent, key=lambda one: (one.key, one.version))]
    assert receipts(topic, PARALLEL) == due, "each once, in the order of its key"
    assert {*database.statuses().values()} == {"replayed"}


def handle_here(settings: Settings, of: Handler) -> None:
    """Run a handler in this process, to the end of what is there."""
    spec = discovery.resolve(settings, discovery.job_of(of))
    supervisor.run(settings, [spec], engine=plain_engine, until_caught_up=True)


@pytest.mark.parametrize("begin", ["earliest", "latest"])
def test_it_begins_with_the_oldest_event_or_with_its_first_start(
    topic: Settings, publisher: Publisher, begin: Literal["earliest", "latest"]
) -> None:
    found: list[str] = []
    of = handler("item", "order", name=begin, begin=begin)(lambda event, _: found.append(event.id))
    some, later = publisher.events(6), publisher.events(6)
    for one in some:  # each in a transaction of its own
        publisher.send([one])
    handle_here(topic, of)
    publisher.send(later)
    handle_here(topic, of)
    due = {one.event_id for one in (later if begin == "latest" else some + later)}
    assert ({*found}, len(found)) == (due, len(due))

    change(topic, f"DELETE FROM positions WHERE topic = '{topic_of(topic)}'")  # as if its job had not asked for it
    change(topic, "DELETE FROM processed_events")
    handle_here(topic, of)
    assert len(found) == len(due) + 12, "a topic that is added is read from its first event"


def change(settings: Settings, statement: str) -> None:
    """Change the sink database as its owner."""
    query(settings, SinkRole.OWNER, statement)


def test_a_handler_is_a_sink_for_every_command_and_runs_by_its_own(topic: Settings, publisher: Publisher) -> None:
    def run(*words: str) -> CompletedProcess[str]:
        return outbox(*words, home=topic.home, **topic.as_env())

    publisher.send(publisher.events(5))
    assert "run it by `outbox handle`" in reported_failure(run("sink", HANDLER, "--until-caught-up"))
    done = run("handle", HANDLER, "--until-caught-up")
    assert (done.returncode, len(receipts(topic))) == (0, 5), done.stderr
    assert logged(done, "applied")
    rewound = run("rewind", HANDLER, "--to-earliest", "--yes")
    assert rewound.returncode == 0, rewound.stderr
    again = run("handle", HANDLER, "--until-caught-up")
    assert (again.returncode, len(receipts(topic))) == (0, 5), "known events are not handled again"
