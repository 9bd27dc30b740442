"""A new version and a new event rolled out under load, on the real chain: the sinks first, or the service first; and
hostile events end to end: a foreign producer on the topic, and declarations that do not fit what is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import psycopg2
import pytest
from confluent_kafka import Message, Producer

from outbox.audit import check
from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.records import headers_of
from outbox.maintenance import retention
from outbox.relay import arrivals
from outbox.sink.decoding.records import Record, Records
from outbox.sink.remembering.asked import NAMES_MAX
from outbox_lab.testing.failures import raises
from outbox_lab.testing.helpers import chosen_seed, query
from tests.support import raw_producer
from tests.support.declared_sinks import record
from tests.support.made_events import DECODER, nth_key, sums, uuid7
from tests.support.record_corpus import GOOD, HEADERS, KEY
from tests.support.releases import (
    KEYS,
    KINDS,
    LABELLED,
    NUMBER,
    OLD_SCALE,
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
from tests.support.sink_process import TIMEOUT_S, Publisher, catch_up, reported_failure
from tests.support.topic_reader import topic_of

TRAIL, WEIGHTS = "trail", "weights"  # a sink of the aggregate, and one of single events
NEW = ["weighed.v2", "labelled.v1"]
BOTH = ["weighed.v1", *NEW]  # older instances of the service go on for a while
SET_ASIDE = {
    TRAIL: {"unknown schema version", "unknown event type", "parked"},
    WEIGHTS: {"unknown schema version", "parked"},
}


@pytest.fixture
def shop(topic: Settings, tmp_path: Path) -> Iterator[Shop]:
    with opened(topic, tmp_path) as made:
        yield made


@pytest.fixture
def old(shop: Shop) -> Release:
    """The release that is deployed everywhere."""
    made = shop.release("old", weighed_v1=WEIGHED_1)
    made.ask(TRAIL, "crate")
    made.ask(WEIGHTS, "crate.weighed")
    shop.succeed(made, "migrate")
    shop.succeed(made, "connect", "apply")
    shop.deploy(made)
    return made


@pytest.fixture
def new(shop: Shop, old: Release) -> Release:
    """The release with a second version of an event, and with a second event."""
    del old
    made = shop.release("new", weighed_v1=WEIGHED_1, weighed_v2=WEIGHED_2, labelled_v1=LABELLED)
    made.ask(TRAIL, "crate", has_scale=True)
    made.ask(WEIGHTS, "crate.weighed", "crate.labelled", has_scale=True)
    return made


def test_sinks_first(shop: Shop, old: Release, new: Release) -> None:
    with shop.writing(chosen_seed()) as service:
        with shop.running(old, TRAIL, WEIGHTS) as sink:
            shop.wait_more(sink, TRAIL, WEIGHTS)
        with shop.running(new, TRAIL, WEIGHTS) as sink:
            shop.wait_more(sink, TRAIL, WEIGHTS)
            deploy_service(shop, new)
            service.kinds = lambda _: BOTH
            shop.wait_more(sink, TRAIL, WEIGHTS)
            service.kinds = lambda _: NEW
            shop.wait_more(sink, TRAIL, WEIGHTS)
    shop.finish(new, TRAIL, WEIGHTS)
    for sink_name in (TRAIL, WEIGHTS):
        assert Database(shop.settings, sink_name).dead_letters() == {}, "nothing was set aside"
    assert scales(shop, old) == {None}
    require_complete(shop, new, TRAIL, WEIGHTS)


def test_service_first(shop: Shop, old: Release, new: Release) -> None:
    with shop.writing(chosen_seed()) as service:
        with shop.running(old, TRAIL, WEIGHTS) as sink:
            shop.wait_more(sink, TRAIL, WEIGHTS)
            deploy_service(shop, new)
            # Some instances of the service are new: half of the crates have newer events too.
            service.kinds = lambda number: BOTH if number < KEYS // 2 else ["weighed.v1"]
            wait_set_aside(shop, sink)
            shop.wait_more(sink, TRAIL, WEIGHTS)  # of the other crates
        rows = Database(shop.settings).query("SELECT DISTINCT convert_from(key, 'UTF8') FROM dead_letters")
        assert {key for (key,) in rows} == set(service.keys[: KEYS // 2]), "no other crate waits"
        assert skipped(shop) == [(WEIGHTS, "*.labelled")], "it does not name the aggregate"
        service.kinds = lambda _: BOTH
        with shop.running(new, TRAIL) as sink:
            assert "0 rejected again" in shop.succeed(new, "dead-letters", "replay", "--all")
            shop.wait_more(sink, TRAIL)
        failure = reported_failure(shop.catch_up(new, WEIGHTS))
        assert "asks for *.labelled, which the sink has passed until now" in failure
        shop.succeed(new, "rewind", WEIGHTS, "--to-earliest", "--yes")
        with shop.running(new, WEIGHTS) as sink:
            shop.wait_more(sink, WEIGHTS)
    shop.finish(new, TRAIL, WEIGHTS)
    for sink_name, reasons in SET_ASIDE.items():
        assert set(shop.reasons(sink_name, "replayed")) == reasons
    assert shop.reasons(WEIGHTS) == {}
    # What it had skipped came behind the others of its key.
    assert {key: sorted(found) for key, found in shop.trail(WEIGHTS).items()} == shop.written()
    require_complete(shop, new, TRAIL)


def deploy_service(shop: Shop, release: Release) -> None:
    """Let the database take the new events of a release, beside the service that goes on; then let the service write
    them.
    """
    assert all(is_refused(shop.settings, kind) for kind in NEW)
    shown = shop.succeed(release, "migrate")
    assert all(f"crate.{kind}" in shown for kind in NEW), shown
    assert not any(is_refused(shop.settings, kind) for kind in NEW)
    shop.deploy(release)


def is_refused(settings: Settings, kind: str) -> bool:
    """Whether the database refuses an event of a client that does not use `append`."""
    event = event_of(kind, "01a1fc75-167d-7239-af57-d1ee1a62e0a6", 1)
    row = (event.aggregatetype, event.aggregateid, event.type, event.schema_version)
    sql = "INSERT INTO outbox (aggregatetype, aggregateid, type, schema_version, payload) VALUES (%s, %s, %s, %s, '{}')"
    try:
        query(settings, f"BEGIN; {sql}; ROLLBACK", SourceRole.APP, row)
    except psycopg2.errors.CheckViolation as error:
        return error.diag.constraint_name == "event_is_declared"
    return False


def wait_set_aside(shop: Shop, sink: ReleasedSink) -> None:
    """Wait until new events are set aside or skipped, and later ones of all their crates wait."""

    def waits() -> bool:
        assert sink.is_running(), sink.tail()
        found = {name: shop.reasons(name) for name in SET_ASIDE}
        are_aside = all(found[name].get(reason, 0) > KEYS for name, all_of in SET_ASIDE.items() for reason in all_of)
        return are_aside and skipped(shop) != []

    wait_for("events to be set aside", waits, timeout_s=TIMEOUT_S)


def skipped(shop: Shop) -> list[tuple[object, ...]]:
    """Events that sinks have recorded as skipped."""
    return Database(shop.settings).query("SELECT sink, event FROM skipped_events ORDER BY 1, 2")


def scales(shop: Shop, release: Release) -> set[object]:
    """Values that the projection of a release has seen in the column that came with version 2."""
    sql = "SELECT DISTINCT scale FROM trail WHERE release = %s AND grams > 0"
    return {scale for (scale,) in Database(shop.settings).query(sql, release.name)}


def require_complete(shop: Shop, release: Release, *sinks: str) -> None:
    """Each event was applied once, those of a crate in their order, and a check finds nothing wrong."""
    assert scales(shop, release) == {OLD_SCALE, "belt"}
    written = shop.written()
    assert len(written) == KEYS
    for sink in sinks:
        assert shop.trail(sink) == written
        assert shop.reasons(sink) == {}
    report = shop.check(release)
    assert report["findings"] == []
    assert report["settled"]


RANDOM = Random(2222)  # noqa: S311
FIRST = "first"  # a sink of one version
TYPES, VERSIONS = NAMES_MAX + 500, 500  # that somebody makes up
ODD_VERSIONS = ["0", "-1", "1.0", "x", "", "²", "9" * 1000]
MEMORY_MAX_BYTES = 64 << 20  # more than before, of a sink that reads all of it
OUTPUT_MAX_BYTES = 20_000  # of a check that finds all of it


# Hostile events -----------------------------------------------------------------------------------------------------


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


def foreign(type_: str, number: int, version: object = 1) -> Record:
    """A record that was never in the outbox, on a crate that the service does not have."""
    payload = {"crate_id": nth_key(number), "version": 1, **KINDS["weighed.v1"]}
    return record(type_, payload, version, key=nth_key(number))


def wait_read(shop: Shop, sink: ReleasedSink, *names: str) -> None:
    """Wait until sinks have read all that is on the topic now."""
    end = topics.last_stable_offsets(shop.settings, shop.topic)

    def has_read() -> bool:
        assert sink.is_running(), sink.tail()
        positions = [Database(shop.settings, name).positions(shop.topic) for name in names]
        return all(one.get(partition, 0) >= offset for one in positions for partition, offset in end.items())

    wait_for("all to be read", has_read, timeout_s=TIMEOUT_S)


def recorded(shop: Shop, sink: str) -> set[str]:
    """The names that a sink has recorded as skipped."""
    rows = Database(shop.settings, sink).query("SELECT event FROM skipped_events WHERE sink = %s", sink)
    return {str(name) for (name,) in rows}


def test_made_up_types_and_versions(shop: Shop, release: Release) -> None:
    made_up = [foreign(f"made.up.{number}", number) for number in range(TYPES)]
    versions = [str(number) for number in range(3, VERSIONS + 3)] + ODD_VERSIONS
    made_up += [foreign("weighed", number, version) for number, version in enumerate(versions)]
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

    def test_driver_and_executors_keep_one_dead_letter(
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
