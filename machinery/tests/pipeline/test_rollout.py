"""A new version and a new event rolled out under load, on the real chain; and hostile events end to end: a foreign
producer on the topic, a header that no client of Python reads, and a declaration that does not fit.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Message, cimpl
from psycopg2 import extensions
from psycopg2.extras import execute_values

from outbox.audit import check
from outbox.base import project
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.kafka.records import headers_of
from outbox.maintenance import retention
from outbox.relay import arrivals
from outbox.sink.decoding.records import Record, Records
from outbox_lab.stack.command import SinkProcess
from outbox_lab.testing.command import outbox, run
from outbox_lab.testing.helpers import chosen_seed, query
from tests import orders
from tests.support import suite
from tests.support.audit_chain import codes
from tests.support.declared import Events
from tests.support.declared_sinks import record
from tests.support.made_events import DECODER, nth_key
from tests.support.outbox_rows import INSERT, Row, Writer, at_work
from tests.support.record_corpus import GOOD, HEADERS, KEY
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    TIMEOUT_S,
    Publisher,
    catch_up,
    catch_up_plain,
    reported_failure,
    running_warm,
    wait_applied,
)
from tests.support.topic_reader import relayed, topic_of

ALL, SINGLE = "orders", "activity"  # a sink of the aggregate, and one of single events
LATER = ("placed.v2.schema.json", "upcast.py", "cancelled.v1.schema.json")  # files that the older release lacks
OLD, NEW = ["placed.v1"], ["placed.v1", "placed.v2", "cancelled.v1"]  # older instances of the service go on
SET_ASIDE = {
    ALL: {"unknown schema version", "unknown event type", "parked"},
    SINGLE: {"unknown schema version", "parked"},
}
TRAIL = """
CREATE TABLE trail (line bigserial, sink text, order_id uuid, version bigint, unit text);
GRANT SELECT, INSERT ON trail TO {writer};
GRANT USAGE ON SEQUENCE trail_line_seq TO {writer};
"""
PROJECTION = """-- ordered
INSERT INTO trail (sink, order_id, version, unit)
SELECT %(sink)s, order_id, version, {unit} FROM new_events ORDER BY order_id, version;
"""
EVENTS: dict[str, Callable[[str, int], Record]] = {
    "placed.v1": orders.placed,
    "placed.v2": partial(orders.placed, unit="KGM"),
    "cancelled.v1": orders.cancelled,
}


def release(root: Path, *, is_new: bool) -> Path:
    """A copy of the fixture domain whose sinks write down each event of an order; the older one knows one event."""
    suite.copied_to(root)
    for name in () if is_new else LATER:
        (root / "events" / "order" / name).unlink()
    sinks, names = root / "stock" / "sinks", ["order.placed", "order.cancelled"][: 1 + is_new]
    (sinks / SINGLE / "job.py").write_text(f"from outbox.sinks import SinkJob\n\njob = SinkJob(events={names})\n")
    for sink in SET_ASIDE:
        projection = PROJECTION.format(unit="unit" if is_new else "NULL")
        (sinks / sink / "projections" / f"{sink}.sql").write_text(projection)
    return root


class Orders(Writer):
    """A service that never stops writing events of its orders."""

    kinds: Callable[[int], Sequence[str]] = staticmethod(lambda _: OLD)  # which events there are of a numbered order

    def write(self, connection: extensions.connection) -> int:
        numbers = self.random.choices(range(len(self.keys)), k=self.random.randint(1, 10))
        with connection, connection.cursor() as cursor:
            execute_values(cursor, INSERT, [*map(self._row, numbers)])
        return len(numbers)

    def _row(self, number: int) -> Row:
        kind, key = self.random.choice(self.kinds(number)), self.keys[number]
        value = EVENTS[kind](key, self.next_version(key)).value or b""
        type_, _, schema_version = kind.partition(".v")
        return Row("order", key, type_, value.decode(), schema_version=int(schema_version))


def wait_more(sinks: SinkProcess, settings: Settings, *names: str) -> None:
    """Wait until each of these sinks has applied more events."""
    for database in [Database(settings, name) for name in names]:
        wait_applied(sinks, database, database.applied() + 100)


def reasons(settings: Settings, sink: str, status: str = "open") -> Counter[object]:
    """How many dead letters a sink has, by reason."""
    sql = "SELECT reason FROM dead_letters WHERE sink = %s AND status = %s"
    return Counter(reason for (reason,) in Database(settings).query(sql, sink, status))


def trail(settings: Settings, sink: str) -> dict[str, list[int]]:
    """The versions of each order's events, as a sink has applied them."""
    sql = "SELECT order_id::text, array_agg(version ORDER BY line) FROM trail WHERE sink = %s GROUP BY order_id"
    return dict(query(settings, sql, SinkRole.OWNER, [sink]))


def test_service_first(chain: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database and the service get the new events, and later the sinks; the service never stops."""
    writer = chain.role_name(SinkRole.WRITER)
    query(chain, TRAIL.format(writer=writer), SinkRole.OWNER)
    old, new = (release(tmp_path / name, is_new=name == "new") for name in ("old", "new"))
    skipped = "SELECT sink, event FROM skipped_events"
    monkeypatch.setenv(project.VARIABLE, str(old))
    run(chain, "migrate", "--only-declared")
    with at_work(Orders(chain, chosen_seed(), 0.03, keys=30)) as service:
        with running_warm(chain, ALL, SINGLE) as sinks:
            wait_more(sinks, chain, ALL, SINGLE)
            monkeypatch.setenv(project.VARIABLE, str(new))
            run(chain, "migrate")
            service.kinds = lambda number: NEW if number < 15 else OLD  # some instances of the service are new

            def waits() -> bool:
                assert sinks.is_running(), sinks.tail()
                found = [reasons(chain, sink)[reason] for sink, every in SET_ASIDE.items() for reason in every]
                return min(found) > len(service.keys) and Database(chain).query(skipped) != []

            wait_for("events to be set aside", waits, timeout_s=TIMEOUT_S)
            wait_more(sinks, chain, ALL, SINGLE)  # of the other orders
        waiting = Database(chain).query("SELECT DISTINCT convert_from(key, 'UTF8') FROM dead_letters")
        assert {key for (key,) in waiting} == {*service.keys[:15]}, "no other order waits"
        assert Database(chain).query(skipped) == [(SINGLE, "*.cancelled")], "it does not name the aggregate"
        service.kinds = lambda _: NEW
        with running_warm(chain, ALL) as sinks:
            assert "0 rejected again" in run(chain, "dead-letters", "replay", "--all")
            wait_more(sinks, chain, ALL)
        failure = reported_failure(catch_up(chain, SINGLE))
        assert "asks for *.cancelled, which the sink has passed until now" in failure
        run(chain, "rewind", SINGLE, "--to-earliest", "--yes")
        with running_warm(chain, SINGLE) as sinks:
            wait_more(sinks, chain, SINGLE)
        assert service.is_alive(), "it has never stopped"
    relayed(chain, timeout_s=TIMEOUT_S)
    done = catch_up(chain, ALL, SINGLE)
    assert done.returncode == 0, done.stderr
    written = {
        key: [*range(1, count + 1)]
        for key, count in query(chain, "SELECT aggregateid, count(*) FROM outbox GROUP BY aggregateid")
    }
    assert trail(chain, ALL) == written, "each once, in the order of its key"
    # What it had skipped came behind the others of its key.
    assert {key: sorted(versions) for key, versions in trail(chain, SINGLE).items()} == written
    for sink, every in SET_ASIDE.items():
        assert ({*reasons(chain, sink, "replayed")}, reasons(chain, sink)) == (every, {})
    units = Database(chain).query("SELECT DISTINCT unit FROM trail WHERE sink = %s", ALL, role=SinkRole.OWNER)
    assert {*units} == {(None,), ("PCE",), ("KGM",)}, "of the older release or a cancellation, upcast, and new"


# Hostile events -----------------------------------------------------------------------------------------------------

TYPES, VERSIONS = 1_500, 500  # that somebody makes up
ODD_VERSIONS = ["0", "-1", "1.0", "x", "", "²", "9" * 1000]
OUTPUT_MAX_BYTES = 20_000  # of a check that finds all of it


def test_made_up_types_and_versions(topic: Settings, publisher: Publisher) -> None:
    versions = [*map(str, range(3, VERSIONS + 3)), *ODD_VERSIONS]
    made_up = [record(f"made.up.{number}", {}, key=nth_key(number)) for number in range(TYPES)]
    made_up += [record("placed", {}, version, key=nth_key(1)) for version in versions]
    publisher.send_records(topic_of(topic, "order"), made_up)
    done = catch_up_plain(topic, ALL)
    assert (done.returncode, "made.up" in done.stderr) == (0, False), "no line for each name"
    assert reasons(topic, ALL) == {"unknown event type": TYPES, "unknown schema version": len(versions)}
    checked = outbox("check", "--json", home=topic.home, **topic.as_env())
    assert len(checked.stdout) + len(checked.stderr) < OUTPUT_MAX_BYTES
    found = {one["code"]: one["count"] for one in json.loads(checked.stdout)["findings"]}
    assert found["malformed-records"] == len(made_up)
    run(topic, "dead-letters", "discard", "--all", "--because", "somebody has made them up")
    assert "malformed-records" not in codes(check.check(topic))


def test_event_that_declares_no_key(databases: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing starts with such a declaration, so nothing is written or applied by it."""
    wrong = suite.copied_to(tmp_path / "wrong")
    monkeypatch.setenv(project.VARIABLE, str(wrong))
    toml, version = 'key = "crate_id"\nversion = "version"\n', {"type": "integer", "minimum": 1, "maximum": 9}
    schema = {"type": "object", "required": ["version"], "properties": {"version": version}}
    Events(wrong / "events").aggregate("crate", toml, labelled_v1=schema)
    for words in (["migrate"], ["connect", "apply"], ["sink", "dedup"], ["check"], ["events"]):
        done = outbox(*words, home=databases.home, **databases.as_env())
        assert done.returncode == 1, words
        (line,) = done.stderr.splitlines()
        assert "crate.labelled.v1: crate_id cannot be the key" in line


PRODUCER, COPY, ERROR_BYTES, WAIT_MS = 0, 2, 512, 30_000
TOPIC, PARTITION, VALUE, RECORD_KEY, FLAGS, HEADER = 1, 3, 4, 5, 7, 9  # rd_kafka_vtype_t
CONTENT_BYTES = 64  # of an argument, behind its type: rd_kafka_vu_t


def produce_raw(settings: Settings, key: bytes, value: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Write a record whose headers' names are any bytes, by librdkafka itself: its client for Python takes text."""
    library = ctypes.CDLL(cimpl.__file__)  # symbols of what it depends on are found too
    for function in (library.rd_kafka_conf_new, library.rd_kafka_new, library.rd_kafka_produceva):
        function.restype = ctypes.c_void_p
    kept: list[ctypes.Array[ctypes.c_char]] = []  # what an argument points at

    def argument(type_: int, *content: int | bytes) -> bytes:
        words = b"".join(struct.pack("q", one if isinstance(one, int) else address(one)) for one in content)
        return struct.pack("q", type_) + words.ljust(CONTENT_BYTES, b"\0")

    def address(content: bytes) -> int:
        kept.append(ctypes.create_string_buffer(content))
        return ctypes.addressof(kept[-1])

    error, configuration = ctypes.create_string_buffer(ERROR_BYTES), ctypes.c_void_p(library.rd_kafka_conf_new())
    for name, option in client_config(settings).items():
        words = (name.encode(), str(option).encode())
        assert library.rd_kafka_conf_set(configuration, *words, error, ERROR_BYTES) == 0, error.value
    made = library.rd_kafka_new(PRODUCER, configuration, error, ctypes.c_size_t(ERROR_BYTES))
    assert made, error.value
    arguments = [argument(TOPIC, topic_of(settings).encode()), argument(PARTITION, 0), argument(FLAGS, COPY)]
    arguments += [argument(RECORD_KEY, key, len(key)), argument(VALUE, value, len(value))]
    arguments += [argument(HEADER, name, content, len(content)) for name, content in headers]
    producer = ctypes.c_void_p(made)
    try:
        assert not library.rd_kafka_produceva(producer, b"".join(arguments), ctypes.c_size_t(len(arguments)))
        assert library.rd_kafka_flush(producer, WAIT_MS) == 0
    finally:
        library.rd_kafka_destroy(producer)


def test_a_header_whose_name_is_not_utf8_makes_a_record_without_headers(topic: Settings) -> None:
    """Each reader takes it as no event, although it would be a valid one without that header."""
    headers = [(name.encode(), text.encode()) for name, text in HEADERS.items()]
    produce_raw(topic, KEY.encode(), json.dumps(GOOD).encode(), [*headers, (b"\xff", b"x")])
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
    assert catch_up_plain(topic, "dedup").returncode == 0
    assert [*Database(topic).dead_letters().values()] == ["missing id"]
