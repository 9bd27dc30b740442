"""A sink of two topics as a process: what it applies, and what kills, repairs and other deployments do to it."""

from __future__ import annotations

from collections import Counter

from outbox.base.settings import Settings
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

    def send(self) -> None:
        """Publish events on both topics."""
        items, begin = self._publisher.events(20), len(self.orders)
        for number in range(begin, begin + SENT):
            key, version = nth_key(number % ORDERS), number // ORDERS + 1
            self.orders.append(placed(key, version) if version == 1 else cancelled(key, version))
        self._publisher.send(items)
        self._publisher.send_records(self._orders, self.orders[begin:])
        self.items += items

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


class TestOtherTopics:
    """A deployment lets the sink read more topics, or fewer. Spark continues no checkpoint then."""

    @staticmethod
    def finish(settings: Settings, traffic: Traffic) -> None:
        """Let the sink catch up with both topics."""
        done = catch_up(settings, SINK)
        assert done.returncode == 0, done.stderr
        assert counted(settings) == traffic.due()
        assert counts(settings) == (len(traffic.items) + len(traffic.orders), 0, 0), "nothing came twice"

    def test_a_topic_that_is_added_is_read_from_its_first_event_and_goes_on_after_a_removal(
        self, topic: Settings
    ) -> None:
        fault, traffic = faulty_sink.without_orders.__name__, Traffic(topic)
        traffic.send()
        with running_faulty(fault, topic, SINK) as sink:
            wait_applied(sink, Database(topic, SINK), len(traffic.items))
        traffic.send()
        self.finish(topic, traffic)
        assert checkpoint(topic, f"{SINK}.1").exists()
        traffic.send()
        self.finish(topic, traffic)
        assert not checkpoint(topic, f"{SINK}.2").exists(), "once, not at every start"
        kinds = Database(topic).query("SELECT DISTINCT kinds FROM activity WHERE aggregate = 'order'")
        assert kinds == [(["order.cancelled", "order.placed"],)]

        read = len(traffic.orders)
        traffic.send()
        assert "no longer asks for order.cancelled" in reported_failure(catch_up_faulty(fault, topic, SINK))
        assert run_faulty(fault, topic, "rewind", SINK, "--to-positions", "--yes").returncode == 0
        with running_faulty(fault, topic, SINK) as sink:
            wait_applied(sink, Database(topic, SINK), len(traffic.items) + read)
        assert sum(int(str(n)) for (aggregate, _), n in counted(topic).items() if aggregate == "order") == read
        traffic.send()
        self.finish(topic, traffic)
