"""The evidence on a real topic, slot and outbox: each piece alone holds a day back that could be dropped without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import UTC, datetime, timedelta
from random import Random

import pytest
from confluent_kafka import Producer

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka.clients import client_config
from outbox.maintenance import retention
from outbox.maintenance.retention import Retired
from tests.support.events import NOW_MS, Event, batch, nth_key, uuid7
from tests.support.outbox_rows import insert, row
from tests.support.sink_driver import Database, open_sink
from tests.support.topic_reader import relayed

RANDOM = Random(11)  # noqa: S311
DAY_MS = 24 * 60 * 60 * 1000
INSERT = "INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES (%s, 'item', 'a', 'x', '{}')"


def aged(days: int) -> str:
    """The id of an event of so many days ago."""
    return uuid7(RANDOM, NOW_MS - days * DAY_MS)


def partition(days: int) -> str:
    return f"processed_events_{datetime.fromtimestamp(NOW_MS / 1000, UTC) - timedelta(days=days):%Y%m%d}"


def advance(settings: Settings) -> None:
    """Confirm all of the slot, as the relay does of what it has sent."""
    with closing(connect(settings, SourceRole.CDC)) as connection, connection, connection.cursor() as cursor:
        cursor.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", [settings.connector])


def relay(settings: Settings) -> None:
    """A commit, which writes out what lies before it in the log, and its confirmation."""
    insert(settings, row())
    advance(settings)


def retire(settings: Settings, *, dry_run: bool = False) -> Retired:
    """Retire, with a relay that confirms what it reads."""
    return retention.retire(settings, dry_run=dry_run, stir=lambda: relay(settings))


def names(retired: Retired) -> list[str]:
    return [day.name for day in retired.dropped]


def places(retired: Retired) -> list[str]:
    return [found.place for found in retired.held_by]


def owner(settings: Settings, statement: str, *parameters: object) -> None:
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement, parameters)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What will not come is not waited for."""
    monkeypatch.setattr(retention, "WRITERS_TIMEOUT_S", 0.5)
    monkeypatch.setattr(retention, "CONFIRM_TIMEOUT_S", 0.5)
    monkeypatch.setattr(retention, "STIR_EVERY_S", 0.05)


@pytest.fixture
def settled(topic: Settings, quick: None) -> Iterator[Settings]:
    """A slot, an empty topic and outbox, and a sink that has applied events of 9 and of 6 days ago, and of today."""
    with closing(connect(topic, SourceRole.CDC)) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            create = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
            cursor.execute(create, [topic.connector])
            with open_sink(topic) as sink:
                sink.apply(batch([Event(aged(days), nth_key(days), 1, 1) for days in (9, 6, 0)]))
            yield topic
            drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"
            cursor.execute(drop, [topic.connector])


@contextmanager
def on_topic(settings: Settings, event_id: str) -> Iterator[None]:
    producer = Producer(client_config(settings))
    texts: tuple[str | bytes | None, ...] = (event_id, "no id", "0" * 36, b"\xff", None)
    for text in texts:
        producer.produce(settings.topic, b"{}", partition=0, headers=[("id", text)])
    producer.produce(settings.topic, b"{}", partition=0)
    assert producer.flush(30) == 0
    yield


@contextmanager
def in_outbox(settings: Settings, event_id: str) -> Iterator[None]:
    owner(settings, INSERT, event_id)
    yield


@contextmanager
def in_a_transaction(settings: Settings, event_id: str) -> Iterator[None]:
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(INSERT, [event_id])
        yield


@contextmanager
def in_a_letter(settings: Settings, event_id: str) -> Iterator[None]:
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(
            'INSERT INTO dead_letters (sink, identity, topic, topic_id, partition, "offset", event_id, reason, detail)'
            " VALUES ('naive', %(id)s, 't', 'x', 0, 0, %(id)s, 'test', '')",
            {"id": event_id},
        )
    yield


def test_without_any_evidence_all_but_today_and_yesterday_is_dropped(settled: Settings) -> None:
    lines: list[str] = []
    would = retire(settled, dry_run=True)
    assert names(would) == [partition(9), partition(6)]
    assert names(retire(settled, dry_run=True)) == names(would), "a dry run has dropped nothing"
    done = retention.retire(settled, report=lines.append, stir=lambda: relay(settled))
    assert (names(done), places(done)) == ([partition(9), partition(6)], ["clock"])
    assert [line.partition(":")[0] for line in lines] == [
        "transactions that write events",
        "outbox table",
        "write-ahead log",
        "topic",
        "open dead letters",
        "clock",
        f"dropped {partition(9)}",
        f"dropped {partition(6)}",
    ]
    assert names(retire(settled)) == []


@pytest.mark.parametrize(
    ("place", "hold"),
    [
        ("topic", on_topic),
        ("outbox table", in_outbox),
        ("open dead letters", in_a_letter),
        ("transactions that write events", in_a_transaction),
    ],
)
def test_an_event_in_one_place_alone_holds_its_day_back(
    settled: Settings, place: str, hold: Callable[[Settings, str], AbstractContextManager[None]]
) -> None:
    with hold(settled, aged(6)):
        retired = retire(settled)
    # What a transaction has written cannot be seen, so it might be of any day.
    assert names(retired) == ([] if hold is in_a_transaction else [partition(9)])
    assert places(retired) == [place]


def test_what_the_slot_has_not_confirmed_holds_everything_back(settled: Settings) -> None:
    owner(settled, INSERT, aged(6))
    owner(settled, "DELETE FROM outbox")
    retired = retention.retire(settled)
    assert (names(retired), places(retired)) == ([], ["write-ahead log"])
    assert names(retire(settled)) == [partition(9), partition(6)]


def test_below_the_floor_nothing_holds_anything_back(settled: Settings) -> None:
    with in_outbox(settled, aged(6)):
        assert names(retire(settled)) == [partition(9)]
    owner(settled, "DELETE FROM outbox")
    old = aged(8)
    with on_topic(settled, old), in_outbox(settled, old), in_a_letter(settled, old):
        assert names(retire(settled)) == [partition(6)]


def test_ids_that_are_never_applied_hold_nothing_back(settled: Settings) -> None:
    one = aged(6)
    random = f"{one[:14]}4{one[15:]}"
    with on_topic(settled, random), in_outbox(settled, random), in_a_letter(settled, random):
        assert names(retire(settled)) == [partition(9), partition(6)]


def test_a_letter_that_is_closed_holds_nothing_back(settled: Settings) -> None:
    with in_a_letter(settled, aged(6)):
        assert places(retire(settled, dry_run=True)) == ["open dead letters"]
    with closing(connect(settled, SinkRole.WRITER)) as connection, connection, connection.cursor() as cursor:
        cursor.execute("UPDATE dead_letters SET status = 'discarded'")
    assert names(retire(settled)) == [partition(9), partition(6)]


def test_a_transaction_that_ends_while_it_is_waited_for_is_seen(
    settled: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "WRITERS_TIMEOUT_S", 30)
    with closing(connect(settled, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(INSERT, [aged(6)])
        ending = threading.Timer(0.3, connection.commit)
        ending.start()
        retired = retire(settled)
        ending.join()
    assert (names(retired), places(retired)) == ([partition(9)], ["outbox table"])


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("kafka_bootstrap", "127.0.0.1:1", "Kafka at"),
        ("topic", "no.such.topic", "there is no topic"),
        ("connector", "no_such_slot", "slot no_such_slot is not there"),
        ("source_db_port", 1, "database source"),
    ],
)
def test_a_place_that_cannot_be_read_fails_before_anything_is_dropped(
    settled: Settings, setting: str, value: object, told: str
) -> None:
    elsewhere = settled.model_copy(update={setting: value})
    with pytest.raises(Failure, match=told):
        retention.retire(elsewhere, stir=lambda: relay(settled))
    assert len(Database(settled).query("SELECT FROM processed_days")) == 3


def test_with_a_real_relay_a_commit_stirs_the_slot(chain: Settings) -> None:
    with open_sink(chain) as sink:
        sink.apply(batch([Event(aged(days), nth_key(days), 1, 1) for days in (9, 6, 0)]))
    held = aged(6)
    owner(chain, INSERT, held)
    relayed(chain, [held])
    owner(chain, "DELETE FROM outbox")
    retired = retention.retire(chain, stir=lambda: insert(chain, row()))
    assert (names(retired), places(retired)) == ([partition(9)], ["topic"])
