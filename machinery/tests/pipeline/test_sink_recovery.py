"""A running sink that fails: which failures it survives by itself, and what its neighbours and its health show then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import pytest
import requests
from confluent_kafka.admin import AdminClient

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.relay import connectors
from outbox.sink.remembering import fence
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.postgres import Postgres
from tests.support import faulty_sink
from tests.support.made_events import sums
from tests.support.sink_driver import Database, open_sink
from tests.support.sink_process import (
    TIMEOUT_S,
    Publisher,
    catch_up,
    reported_failure,
    run_faulty,
    running,
    running_faulty,
    running_plain,
    running_warm,
    sink_arguments,
    wait_applied,
)
from tests.support.topic_reader import topic_of


def health(sinks: SinkProcess) -> dict[str, Any]:
    """The states of the sinks of a process."""
    answer = requests.get(f"{sinks.url()}/healthz", timeout=30)
    states: dict[str, Any] = answer.json()["sinks"]
    assert answer.ok is all(one["state"] == "running" for one in states.values())
    return states


def wait_state(sinks: SinkProcess, sink: str, state: str, failure: str | None = None) -> None:
    """Wait until a sink is in this state."""
    wanted = {"state": state, "failure": failure}
    wait_for(f"sink {sink} to be {state}", lambda: health(sinks)[sink] == wanted, timeout_s=TIMEOUT_S)


@contextmanager
def rows_locked(settings: Settings, sink: str) -> Iterator[None]:
    """Somebody has changed the rows of a sink's projection, and does not commit."""
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute("UPDATE stock SET stock = stock WHERE sink = %s", [sink])
        assert cursor.rowcount
        yield
        connection.rollback()


def hang_up_all(database: Database) -> None:
    """Postgres ends every connection to the database."""
    database.query(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND datname = current_database()"
    )


def driver(settings: Settings) -> fence.Holder | None:
    """The connection that drives the sink."""
    with closing(connect(settings, SinkRole.AUDITOR)) as connection, connection.cursor() as cursor:
        return fence.driver(cursor, "dedup")


def test_a_lock_that_is_not_free_in_time_fails_a_sink_until_it_is(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    naive, some = Database(topic, "naive"), publisher.events(30)
    publisher.send(some[:10])
    with running_faulty(faulty_sink.short_waits.__name__, topic, "dedup", "naive") as sinks:
        wait_applied(sinks, database, 10)
        wait_applied(sinks, naive, 10)
        with rows_locked(topic, "dedup"):
            publisher.send(some[10:20])
            wait_state(sinks, "dedup", "failing", "database-busy")
            wait_applied(sinks, naive, 20)
            assert health(sinks)["naive"]["state"] == "running"
            assert 'outbox_sink_up{sink="dedup"} 0.0' in requests.get(sinks.url(), timeout=30).text
        wait_applied(sinks, database, 20)
        wait_state(sinks, "dedup", "running")
        publisher.send(some[20:])
        wait_applied(sinks, database, 30)
        wait_applied(sinks, naive, 30)
    assert database.totals() == naive.totals() == sums(some)


def test_a_sink_whose_failure_lasts_ends_the_process(topic: Settings, publisher: Publisher, database: Database) -> None:
    some = publisher.events(20)
    publisher.send(some[:10])
    assert catch_up(topic).returncode == 0
    publisher.send(some[10:])
    with rows_locked(topic, "dedup"):
        ended = run_faulty(faulty_sink.few_retries.__name__, topic, *sink_arguments("naive", "dedup"))
    assert "sink dedup: the database refused" in reported_failure(ended)
    assert Database(topic, "naive").totals() == sums(some)
    assert catch_up(topic).returncode == 0
    assert database.totals() == sums(some)


def test_a_caller_that_waits_for_the_end_gets_the_first_failure(topic: Settings, publisher: Publisher) -> None:
    some = publisher.events(20)
    publisher.send(some[:10])
    assert catch_up(topic).returncode == 0
    publisher.send(some[10:])
    with rows_locked(topic, "dedup"):
        ended = run_faulty(faulty_sink.short_waits.__name__, topic, *sink_arguments(), "--until-caught-up")
    assert "sink dedup: the database refused" in reported_failure(ended)
    assert "starts again" not in ended.stderr


@pytest.mark.parametrize("run", [running_warm, running_plain])
def test_a_sink_that_has_lost_its_connection_goes_on_with_another_one(
    topic: Settings, publisher: Publisher, database: Database, run: Callable[..., AbstractContextManager[SinkProcess]]
) -> None:
    some = publisher.events(20)
    publisher.send(some[:10])
    with run(topic, "naive") as sink:
        naive = Database(topic, "naive")
        wait_applied(sink, naive, 10)
        hang_up_all(database)
        publisher.send(some[10:])
        wait_applied(sink, naive, 20)
        wait_state(sink, "naive", "running")
    assert naive.totals() == sums(some)


def test_an_idle_sink_that_has_lost_its_connection_takes_its_fence_again(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    publisher.send(publisher.events(10))
    with running_warm(topic, "dedup") as sink:
        wait_applied(sink, database, 10)
        wait_state(sink, "dedup", "running")
        before = driver(topic)
        hang_up_all(database)
        wait_for(
            "another connection to drive the sink", lambda: driver(topic) not in (None, before), timeout_s=TIMEOUT_S
        )
        wait_state(sink, "dedup", "running")
        publisher.send(publisher.events(10))
        wait_applied(sink, database, 20)


def test_a_sink_that_has_lost_its_fence_leaves_it_to_the_new_driver(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    publisher.send(publisher.events(10))
    with running_warm(topic, "dedup", "naive") as sinks:
        wait_applied(sinks, database, 10)
        hang_up_all(database)
        with open_sink(topic, "dedup"):
            publisher.send(publisher.events(10))
            wait_state(sinks, "dedup", "failed", "sink-has-driver")
        wait_applied(sinks, Database(topic, "naive"), 20)
        assert sinks.is_running()
    assert database.applied() == 10


def test_a_database_that_hangs_fails_a_sink_until_it_answers(
    topic: Settings, publisher: Publisher, database: Database, postgres: Postgres
) -> None:
    some = publisher.events(20)
    publisher.send(some[:10])
    with running_faulty(faulty_sink.short_silence.__name__, topic, "naive") as sink:
        naive = Database(topic, "naive")
        wait_applied(sink, naive, 10)
        postgres.pause()
        try:
            publisher.send(some[10:])
            wait_state(sink, "naive", "failing", "database-silent")
        finally:
            postgres.resume()
        wait_applied(sink, naive, 20)
        wait_state(sink, "naive", "running")
    assert naive.totals() == sums(some)


def test_a_topic_made_again_and_filled_stops_a_running_sink(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some, name = publisher.events(20), topic_of(topic)
    publisher.send(some)
    with running(topic) as sink:
        wait_applied(sink, database, 20)
        jvm = next(process for process in sink.processes() if process.name() == "java")
        jvm.suspend()  # Spark does not see that the topic is gone for a moment
        recreate(topic, name)
        Publisher(topic, continued=publisher).send(publisher.events(200))
        jvm.resume()
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
        assert f"outbox: sink dedup: topic {name} was deleted and made again" in sink.tail(1)


def test_a_missing_topic_is_waited_for_and_a_new_one_stops_the_sink(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    name = topic_of(topic)
    publisher.send(publisher.events(20))
    with running_warm(topic, "dedup") as sink:
        wait_applied(sink, database, 20)
        delete(topic, name)
        wait_state(sink, "dedup", "failing", "topic-missing")
        create(topic, name)
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
        assert f"outbox: sink dedup: topic {name} was deleted and made again" in sink.tail(1)


def recreate(settings: Settings, name: str) -> None:
    """Delete a topic and make it again, empty."""
    delete(settings, name)
    create(settings, name)


def delete(settings: Settings, name: str) -> None:
    admin = AdminClient(client_config(settings))
    admin.delete_topics([name])[name].result(TIMEOUT_S)
    wait_for("the topic to be gone", lambda: not topics.exists(settings, name), timeout_s=TIMEOUT_S)


def create(settings: Settings, name: str) -> None:
    topics.create(settings, [one for one in connectors.topic_specs(settings) if one.name == name])
