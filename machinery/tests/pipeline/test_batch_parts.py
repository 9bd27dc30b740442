"""A large batch, which executors read and which is applied in parts: what dies or fails in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from tests.support import faulty_sink
from tests.support.faulty_sink import PART_RECORDS
from tests.support.made_events import Event, sums
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, Publisher, catch_up, logged, running_faulty

PARTS = 3  # at least: markers of transactions take offsets too


@pytest.fixture
def some(publisher: Publisher) -> list[Event]:
    """Events for one batch, of several parts."""
    events = publisher.events(PARTS * PART_RECORDS)
    publisher.send(events)
    return events


def applied_and_duplicates(database: Database) -> tuple[object, ...]:
    (counts,) = database.query("SELECT applied, duplicates FROM sinks WHERE name = %s", database.sink)
    return counts


def run_faulty(fault: Callable[[], None], topic: Settings, *names: str) -> str:
    """Run sinks with a fault until they end; returns the end of their log."""
    with running_faulty(fault.__name__, topic, *names) as sinks:
        wait_for("the process to end", lambda: not sinks.is_running(), timeout_s=TIMEOUT_S)
        return sinks.tail(3)


def finish(topic: Settings, *names: str) -> None:
    """Let sinks without a fault apply the rest."""
    done = catch_up(topic, *names)
    assert done.returncode == 0, done.stderr


def test_a_batch_that_dies_between_two_parts_is_applied_once(
    topic: Settings, some: list[Event], database: Database
) -> None:
    """A batch is split once the maximum is lower, though Spark had planned it before.

    With the Kafka source of Spark 4.1.1 this fails: its second run ends after the replayed batch (SPARK-55271).
    """
    naive = Database(topic, "naive")
    run_faulty(faulty_sink.death_between_parts, topic, "naive", "dedup")
    first, first_of_dedup = naive.applied(), database.applied()
    assert 0 < first < len(some)
    lower = topic.replace(sink_max_offsets_per_trigger=PART_RECORDS // 2)
    done = catch_up(lower, "naive", "dedup")
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    parts = [part["batch"] for part in logged(done, "applied") if part["sink"] == "dedup"]
    assert set(parts) == {0}
    assert len(parts) >= 2 * PARTS
    assert applied_and_duplicates(naive) == (len(some) + first, 0)  # so it was applied twice
    assert applied_and_duplicates(database) == (len(some), first_of_dedup)
    assert database.totals() == sums(some)


def test_a_part_that_cannot_be_read_leaves_the_part_before_it_applied(
    topic: Settings, some: list[Event], database: Database
) -> None:
    ended = run_faulty(faulty_sink.unread_part, topic, "dedup")
    assert ended.splitlines()[-1] == f"outbox: {faulty_sink.REFUSED}"
    first = database.applied()
    assert 0 < first < len(some)
    finish(topic)
    assert applied_and_duplicates(database) == (len(some), first)
    assert database.totals() == sums(some)


@pytest.mark.usefixtures("some")
def test_a_refused_part_ends_the_sink_while_the_next_is_read(topic: Settings) -> None:
    ended = run_faulty(faulty_sink.failure_beside_endless_read, topic, "dedup")
    assert ended.splitlines()[-1] == f"outbox: {faulty_sink.REFUSED}"


def test_a_stop_during_the_first_part_waits_for_the_others(
    topic: Settings, some: list[Event], database: Database
) -> None:
    run_faulty(faulty_sink.stop_in_first_part, topic, "dedup")
    assert database.applied() == len(some)
    finish(topic)
    assert applied_and_duplicates(database) == (len(some), 0)  # Spark has recorded the batch as committed


@pytest.mark.usefixtures("some")
def test_what_executors_cannot_read_is_one_clear_line(topic: Settings) -> None:
    ended = run_faulty(faulty_sink.dropped_records, topic, "dedup")
    assert "no longer has what was to be read" in ended.splitlines()[-1]
    assert "Traceback" not in ended


@pytest.mark.usefixtures("some")
def test_a_stop_waits_for_an_apply_for_a_while_only(topic: Settings) -> None:
    ended = run_faulty(faulty_sink.endless_apply, topic, "dedup")
    assert "has not applied its batch within 2 s of the stop" in ended
