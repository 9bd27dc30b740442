"""A sink of two topics as a process: what it applies, and what kills, repairs and other deployments do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.sink.decoding.records import Record
from tests.orders import cancelled, placed
from tests.support import faulty_sink
from tests.support.made_events import Event, nth_key
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    Publisher,
    catch_up,
    catch_up_faulty,
    checkpoint,
    reported_failure,
    run_faulty,
    running_faulty,
    wait_applied,
)
from tests.support.topic_reader import topic_of

SINK = "activity"
ORDERS = 5  # keys, on both partitions of their topic
SENT = 12  # events of orders


class Traffic:
    """Events of items and of orders, some of them with the same keys."""

    def __init__(self, settings: Settings) -> None:
        self._orders = topic_of(settings, "order")
        self._publisher = Publisher(settings)
        self.items: list[Event] = []
        self.orders: list[Record] = []

    def send(self, items: int = 20, orders: int = SENT) -> None:
        """Publish events on both topics."""
        more, placements = self._publisher.events(items), [self._order() for _ in range(orders)]
        self._publisher.send(more)
        self._publisher.send_records(self._orders, placements)
        self.items += more

    def _order(self) -> Record:
        number = len(self.orders)
        key, version = nth_key(number % ORDERS), number // ORDERS + 1
        self.orders.append(placed(key, version) if version == 1 else cancelled(key, version))
        return self.orders[-1]

    @property
    def count(self) -> int:
        """How many events there are."""
        return len(self.items) + len(self.orders)

    def due(self) -> dict[tuple[object, object], object]:
        """How many events the sink must have counted, by aggregate and key."""
        found: Counter[tuple[object, object]] = Counter(("item", event.key) for event in self.items)
        found.update(("order", (one.key or b"").decode()) for one in self.orders)
        return dict(found)


def counted(settings: Settings) -> dict[tuple[object, object], object]:
    """How many events the sink has counted, by aggregate and key."""
    rows = Database(settings, SINK).query("SELECT aggregate, key::text, events FROM activity WHERE sink = %s", SINK)
    return {(aggregate, key): events for aggregate, key, events in rows}


def counts(settings: Settings) -> tuple[object, ...]:
    """Counts of events that the sink has applied, recognised and skipped since it first ran."""
    (row,) = Database(settings, SINK).query("SELECT applied, duplicates, skipped FROM sinks WHERE name = %s", SINK)
    return row


def finish(settings: Settings) -> None:
    """Let the sink catch up."""
    done = catch_up(settings, SINK)
    assert done.returncode == 0, done.stderr


def run_before(deployment: Callable[[], None], settings: Settings, applied: int) -> None:
    """Let an earlier deployment of the sink run until it has applied so many events."""
    with running_faulty(deployment.__name__, settings, SINK) as sink:
        wait_applied(sink, Database(settings, SINK), applied)


@pytest.fixture
def traffic(topic: Settings) -> Traffic:
    made = Traffic(topic)
    made.send()
    return made


class TestOtherTopics:
    """A deployment lets the sink read more topics, or fewer. Spark continues no checkpoint then."""

    def test_a_topic_that_is_added_is_read_from_its_first_event(self, topic: Settings, traffic: Traffic) -> None:
        run_before(faulty_sink.without_orders, topic, applied=20)
        traffic.send()
        finish(topic)
        assert counted(topic) == traffic.due()
        assert counts(topic) == (traffic.count, 0, 0), "nothing came twice"
        assert checkpoint(topic, f"{SINK}.1").exists()
        traffic.send()
        finish(topic)
        assert counted(topic) == traffic.due()
        assert not checkpoint(topic, f"{SINK}.2").exists(), "once, not at every start"

    def test_a_topic_that_is_removed_and_read_again_goes_on_where_it_was(
        self, topic: Settings, traffic: Traffic
    ) -> None:
        finish(topic)
        assert counted(topic) == traffic.due()
        kinds = Database(topic).query("SELECT DISTINCT kinds FROM activity WHERE aggregate = 'order'")
        assert kinds == [(["order.cancelled", "order.placed"],)]
        for name in ("item", "order"):
            ends = topics.last_stable_offsets(topic, topic_of(topic, name))
            assert Database(topic, SINK).positions(topic_of(topic, name)) == ends
        read = len(traffic.orders)
        traffic.send()
        fault = faulty_sink.without_orders.__name__
        assert "no longer asks for order.cancelled" in reported_failure(catch_up_faulty(fault, topic, SINK))
        assert run_faulty(fault, topic, "rewind", SINK, "--to-positions", "--yes").returncode == 0
        run_before(faulty_sink.without_orders, topic, applied=traffic.count - (len(traffic.orders) - read))
        assert sum(int(str(n)) for (aggregate, _), n in counted(topic).items() if aggregate == "order") == read
        traffic.send()
        finish(topic)
        assert counted(topic) == traffic.due()
        assert counts(topic) == (traffic.count, 0, 0)
