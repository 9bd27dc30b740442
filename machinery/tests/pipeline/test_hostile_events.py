"""Hostile events end to end: a foreign producer on the topic, and declarations that do not fit what is there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Message, Producer

from outbox.audit import check
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.records import headers_of
from outbox.maintenance import retention
from outbox.relay import arrivals
from outbox.sink.decoding.records import Record, Records
from outbox.sink.remembering.asked import NAMES_MAX
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import chosen_seed
from tests.support import raw_producer
from tests.support.declared_sinks import record
from tests.support.made_events import DECODER, nth_key, sums, uuid7
from tests.support.record_corpus import GOOD, HEADERS, KEY
from tests.support.releases import (
    KINDS,
    LABELLED,
    NUMBER,
    WEIGHED_1,
    WEIGHED_2,
    Release,
    ReleasedSink,
    Shop,
    codes,
    event_of,
    opened,
)
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, Publisher, catch_up
from tests.support.topic_reader import topic_of

RANDOM = Random(2222)  # noqa: S311
TRAIL, WEIGHTS, FIRST = "trail", "weights", "first"  # sinks of the aggregate, of one event, and of one version
TYPES, VERSIONS = NAMES_MAX + 500, 500  # that somebody makes up
ODD_VERSIONS = ["0", "-1", "1.0", "x", "", "²", "9" * 1000]
MEMORY_MAX_BYTES = 64 << 20  # more than before, of a sink that reads all of it
OUTPUT_MAX_BYTES = 20_000  # of a check that finds all of it


@pytest.fixture
def shop(topic: Settings, tmp_path: Path) -> Iterator[Shop]:
    with opened(topic, tmp_path) as made:
        yield made


@pytest.fixture
def release(shop: Shop) -> Release:
    """The release that is deployed everywhere."""
    made = shop.release("release", weighed_v1=WEIGHED_1, weighed_v2=WEIGHED_2, labelled_v1=LABELLED)
    made.ask(TRAIL, "crate", has_scale=True)
    made.ask(WEIGHTS, "crate.weighed", has_scale=True)
    made.ask(FIRST, "crate.weighed.v1", is_compared=False)
    shop.succeed(made, "migrate")
    shop.succeed(made, "connect", "apply")
    shop.deploy(made)
    return made


def send(shop: Shop, records: Iterable[Record]) -> None:
    """Write records to the topic as somebody who is not the relay. A key is on the partition that it always has."""
    config = {"linger.ms": 20, "partitioner": "murmur2_random", "log_level": 0}
    producer = Producer({**client_config(shop.settings), **config})
    for one in records:
        producer.produce(shop.topic, one.value, one.key, headers=list(one.headers))
        producer.poll(0)
    assert producer.flush(60) == 0


def foreign(type_: str, payload: dict[str, Any], version: object = 1, **more: str) -> Record:
    """A record that was never in the outbox, on a crate that the service does not have."""
    return record(type_, payload, version, **{"key": payload.get("crate_id", "nobody"), **more})


def weighed(key: str, version: int = 1) -> dict[str, Any]:
    """The payload of an event."""
    return {"crate_id": key, "version": version, **KINDS["weighed.v1"]}


def wait_read(shop: Shop, sink: ReleasedSink, *names: str) -> None:
    """Wait until sinks have read all that is on the topic now."""
    end = topics.last_stable_offsets(shop.settings, shop.topic)

    def has_read() -> bool:
        assert sink.is_running(), sink.tail()
        positions = [Database(shop.settings, name).positions(shop.topic) for name in names]
        return all(one.get(partition, 0) >= offset for one in positions for partition, offset in end.items())

    wait_for("all to be read", has_read, timeout_s=TIMEOUT_S)


def test_made_up_types_and_versions(shop: Shop, release: Release) -> None:
    made_up = [foreign(f"made.up.{number}", weighed(nth_key(number))) for number in range(TYPES)]
    versions = [str(number) for number in range(3, VERSIONS + 3)] + ODD_VERSIONS
    made_up += [foreign("weighed", weighed(nth_key(number)), version) for number, version in enumerate(versions)]
    RANDOM.shuffle(made_up)
    with shop.writing(chosen_seed()) as service, shop.running(release, TRAIL, WEIGHTS, FIRST) as sink:
        service.kinds = lambda _: ["weighed.v1", "weighed.v2", "labelled.v1"]
        shop.wait_more(sink, TRAIL, WEIGHTS, FIRST)
        process = sink.processes()[0]
        before = process.memory_info().rss
        send(shop, made_up)
        wait_read(shop, sink, TRAIL, WEIGHTS, FIRST)
        assert process.memory_info().rss < before + MEMORY_MAX_BYTES
        shop.wait_more(sink, TRAIL, WEIGHTS, FIRST)
        assert not any("made.up" in line for line in sink.log_file.read_text().splitlines()), "no line for each name"
    shop.finish(release, TRAIL, WEIGHTS, FIRST)

    assert shop.trail(TRAIL) == shop.written()
    assert shop.trail(WEIGHTS) == shop.written("weighed")
    unknown_versions = {"unknown schema version": len(versions)}
    assert shop.reasons(TRAIL) == {"unknown event type": TYPES, **unknown_versions}
    assert shop.reasons(WEIGHTS) == unknown_versions, "other types are not its own"
    assert shop.reasons(FIRST) == {}, "neither are other versions"
    names = {name: recorded(shop, name) for name in (TRAIL, WEIGHTS, FIRST)}
    assert names[TRAIL] == set()
    assert "crate.labelled" in names[WEIGHTS]
    assert {"crate.labelled", "crate.weighed.v2"} <= names[FIRST]
    for name, declared in ((WEIGHTS, 1), (FIRST, 2)):
        assert len(names[name]) == NAMES_MAX + declared, "as many as there is room for"

    done = shop.run(release, "check", "--json")
    assert len(done.stdout) + len(done.stderr) < OUTPUT_MAX_BYTES
    report = json.loads(done.stdout)
    assert codes(report) == ["malformed-records"], "they are no events that a sink should have applied"
    assert [one["count"] for one in report["findings"]] == [len(made_up)]
    shop.succeed(release, "dead-letters", "discard", "--all", "--because", "somebody has made them up")
    assert shop.check(release)["findings"] == [], "what is known and given up is no problem"


def recorded(shop: Shop, sink: str) -> set[str]:
    """The names that a sink has recorded as skipped."""
    rows = Database(shop.settings, sink).query("SELECT event FROM skipped_events WHERE sink = %s", sink)
    return {str(name) for (name,) in rows}


def test_event_that_declares_no_key(shop: Shop, release: Release) -> None:
    """Nothing starts with such a declaration, so nothing is written or applied by it."""
    wrong = shop.release("wrong", weighed_v1=WEIGHED_1)
    wrong.ask(TRAIL, "crate")
    wrong.declare(labelled_v1={"type": "object", "required": ["version"], "properties": {"version": NUMBER}})
    for words in (["migrate"], ["connect", "apply"], ["sink", TRAIL], ["check"], ["events"]):
        done = shop.run(wrong, *words)
        assert done.returncode == 1, words
        (line,) = done.stderr.splitlines()
        assert "crate.labelled.v1: crate_id cannot be the key" in line
    shop.deploy(wrong)
    with raises("event-declaration-unusable"):
        shop.write(event_of("weighed.v1", nth_key(1), 1))
    shop.deploy(release)
    shop.releases.pop("wrong")
    assert shop.written() == {}


class TestUnreadableHeaders:
    """A record with a header whose name is no UTF-8, which confluent-kafka cannot read: it is one without headers."""

    @staticmethod
    def send(topic: Settings, event_id: str = HEADERS["id"]) -> None:
        """Publish a valid event with one more header, whose name is no UTF-8."""
        readable = [(name.encode(), text.encode()) for name, text in (HEADERS | {"id": event_id}).items()]
        raw_producer.produce(topic, KEY.encode(), json.dumps(GOOD).encode(), [*readable, (b"\xff", b"x")])

    def test_it_is_no_event_for_any_reader(self, topic: Settings) -> None:
        self.send(topic)
        (message,) = records.read(topic, topic_of(topic), topics.watermarks(topic, topic_of(topic)))
        for _ in range(1_000):  # then Python has optimised the call
            headers_of(Message(headers=[("id", b"x")]))
        assert [headers_of(message) for _ in range(2)] == [[], []]  # asked twice, confluent-kafka alone would crash
        with pytest.raises(KeyError):
            arrivals.header_id(message)
        assert retention.deduplication_id(message) is None
        (dead,) = DECODER.decode(Records.of_messages([message])).dead
        assert (dead.event_id, dead.rejection.reason) == (None, "missing id")
        assert check.check(topic).topic(topic_of(topic)).malformed == {"missing id": 1}

    def test_driver_and_executors_keep_it_as_the_same_dead_letter(
        self, topic: Settings, publisher: Publisher, database: Database
    ) -> None:
        event_id = uuid7(RANDOM)
        some = publisher.events(200)  # more than a driver reads itself
        publisher.send(some)
        letters = []
        for _ in range(2):
            self.send(topic, event_id)
            done = catch_up(topic)
            assert done.returncode == 0, done.stderr
            letters.append(database.dead_letters())
        assert list(letters[0].values()) == ["missing id"]
        assert letters[1] == letters[0]
        assert database.totals() == sums(some)
