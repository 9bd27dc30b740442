"""A large batch is applied in parts, each in a transaction of its own: what dies or fails between two of them."""

from __future__ import annotations

import pytest

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from tests.support import faulty_sink
from tests.support.events import Event, sums
from tests.support.faulty_sink import PART_RECORDS
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, Publisher, catch_up, running_faulty

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


def test_a_batch_that_dies_between_two_parts_is_applied_once(
    topic: Settings, some: list[Event], database: Database
) -> None:
    naive = Database(topic, "naive")
    with running_faulty(faulty_sink.death_between_parts.__name__, topic, "naive", "dedup") as sinks:
        wait_for("the process to die", lambda: not sinks.is_running(), timeout_s=TIMEOUT_S)
    first, _ = applied_and_duplicates(naive)
    assert 0 < int(str(first)) < len(some)
    again = catch_up(topic, "naive", "dedup")
    assert again.returncode == 0, again.stderr
    assert applied_and_duplicates(naive) == (len(some) + int(str(first)), 0)  # so it was applied twice
    assert database.totals() == sums(some)
    assert database.staging_tables() == []


def test_a_part_that_cannot_be_read_leaves_the_part_before_it_applied(
    topic: Settings, some: list[Event], database: Database
) -> None:
    with running_faulty(faulty_sink.unread_part.__name__, topic, "dedup") as sink:
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
        assert sink.tail(1) == f"outbox: {faulty_sink.REFUSED}"
    first = database.applied()
    assert 0 < first < len(some)
    again = catch_up(topic)
    assert again.returncode == 0, again.stderr
    assert applied_and_duplicates(database) == (len(some), first)
    assert database.totals() == sums(some)
    assert database.staging_tables() == []


def test_a_stop_during_the_first_part_waits_for_the_others(
    topic: Settings, some: list[Event], database: Database
) -> None:
    with running_faulty(faulty_sink.stop_in_first_part.__name__, topic, "dedup") as sink:
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
    assert database.applied() == len(some)
    assert database.staging_tables() == []
    again = catch_up(topic)
    assert again.returncode == 0, again.stderr
    assert applied_and_duplicates(database) == (len(some), 0)  # Spark has recorded the batch as committed
