"""`outbox check` on histories written by hand: sane ones, and each kind of wrong."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from outbox.audit import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import WaitTimeoutError
from outbox.commands.check import describe
from outbox.kafka import topics
from outbox.kafka.clients import client_config

SINK = "dedup"


@dataclass(frozen=True)
class Event:
    """An event of the ledger, where a test wants it to be."""

    account: str
    amount: int
    version: int
    id: str


class History:
    """Writes ledger, topic and sink directly, each as the test wants it."""

    name = SINK
    version = 1  # of each account of the sink

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ledger = connect(settings, SourceRole.OWNER)
        self._balances = connect(settings, SinkRole.OWNER)
        self._producer = Producer({**client_config(settings), "transactional.id": f"history-{uuid.uuid4()}"})
        self._producer.init_transactions(30)

    def account(self, *amounts: int) -> list[Event]:
        """An account of the ledger with an event in the outbox for each amount."""
        account = str(uuid.uuid4())
        with self._ledger, self._ledger.cursor() as cursor:
            cursor.execute(
                "INSERT INTO accounts (id, kind, currency, balance_minor, version)"
                " VALUES (%s, 'system', 'EUR', %s, %s)",
                [account, sum(amounts), len(amounts)],
            )
            events = []
            for version, amount in enumerate(amounts, start=1):
                payload = json.dumps({"amount": amount, "version": version})
                cursor.execute(
                    "INSERT INTO outbox (aggregatetype, aggregateid, type, payload)"
                    " VALUES ('account', %s, 'transfer.credited', %s) RETURNING id",
                    [account, payload],
                )
                row = cursor.fetchone()
                assert row is not None
                events.append(Event(account, amount, version, row[0]))
        return events

    def publish(self, *events: Event, committed: bool = True) -> None:
        """Put events on the topic, in one transaction."""
        self._producer.begin_transaction()
        for event in events:
            value = json.dumps({"amount": event.amount, "version": event.version})
            self._producer.produce(self._settings.topic, value, event.account, headers=[("id", event.id)], partition=0)
        if committed:
            self._producer.commit_transaction(30)
        else:
            self._producer.flush()
            self._producer.abort_transaction(30)

    def publish_raw(self, value: bytes) -> None:
        """Put something on the topic that is no event."""
        self._producer.begin_transaction()
        self._producer.produce(self._settings.topic, value, b"key", partition=0)
        self._producer.commit_transaction(30)

    def sink(self, next_offset: int | None = None, **balances: int) -> None:
        """A sink that has read so far (default: all of the topic) and has these balances by account."""
        end = topics.last_stable_offsets(self._settings, self._settings.topic)
        if next_offset is not None:
            end[0] = next_offset
        with self._balances, self._balances.cursor() as cursor:
            cursor.execute("INSERT INTO sinks (name, epoch) VALUES (%s, 1)", [self.name])
            for partition, offset in end.items():
                cursor.execute(
                    "INSERT INTO positions (sink, topic, partition, topic_id, next_offset)"
                    " VALUES (%s, %s, %s, 'x', %s)",
                    [self.name, self._settings.topic, partition, offset],
                )
            for account, balance in balances.items():
                cursor.execute(
                    "INSERT INTO balances (sink, account_id, currency, balance_minor, version, events)"
                    " VALUES (%s, %s, 'EUR', %s, %s, 1)",
                    [self.name, account, balance, self.version],
                )

    def set_aside(self, event: Event) -> None:
        """The sink's dead letter of an event."""
        with self._balances, self._balances.cursor() as cursor:
            cursor.execute(
                "INSERT INTO dead_letters"
                ' (sink, identity, topic, topic_id, partition, "offset", event_id, reason, detail)'
                " VALUES (%s, %s, %s, 'x', 0, 0, %s, 'test', '')",
                [self.name, event.id, self._settings.topic, event.id],
            )

    def rebuilt(self, version: int) -> None:
        """The sink's balances are the ledger's, up to this version of each account."""
        with self._balances, self._balances.cursor() as cursor:
            cursor.execute("UPDATE balances SET version = %s, base_version = %s", [version, version])

    def prune(self, *events: Event) -> None:
        """Remove events from the outbox, as `outbox prune` does."""
        with self._ledger, self._ledger.cursor() as cursor:
            cursor.execute("DELETE FROM outbox WHERE id = ANY(%s::uuid[])", [[event.id for event in events]])
            assert cursor.rowcount == len(events)

    def age_out(self, records: int) -> None:
        """Delete the first records of the partition, as retention does."""
        admin = AdminClient(client_config(self._settings))
        for future in admin.delete_records([TopicPartition(self._settings.topic, 0, records)]).values():
            future.result(10)

    def close(self) -> None:
        self._ledger.close()
        self._balances.close()


@pytest.fixture
def history(topic: Settings) -> Iterator[History]:
    made = History(topic)
    yield made
    made.close()


def test_an_empty_chain_is_settled_and_without_findings(topic: Settings) -> None:
    report = check.check(topic)
    assert (report.outbox_events, report.records, report.sinks, report.findings) == (0, 0, [], [])
    assert report.settled


def test_a_sane_history_has_no_findings_whatever_markers_and_aborted_records_lie_between(
    topic: Settings, history: History
) -> None:
    first, second = history.account(5, -2, 4), history.account(7)
    history.publish(first[0], second[0])
    history.publish(*first[1:], committed=False)  # sent again below, as Connect does after an abort
    history.publish(*first[1:])
    history.sink(**{first[0].account: 7, second[0].account: 7})
    report = check.check(topic)
    assert (report.records, report.duplicates, report.gaps, report.in_flight) == (4, 0, 0, 0)
    assert report.findings == []
    assert report.settled


def test_duplicates_on_the_topic_are_counted_and_are_no_finding(topic: Settings, history: History) -> None:
    events = history.account(5, 6)
    history.publish(*events)
    history.publish(*events)
    history.sink(**{events[0].account: 11})
    report = check.check(topic)
    assert (report.records, report.duplicates) == (4, 2)
    assert [(surplus.key, surplus.amount) for surplus in report.surplus] == [(e.account, e.amount) for e in events]
    assert report.findings == []


def test_an_event_that_the_topic_has_jumped_over_is_lost(topic: Settings, history: History) -> None:
    events = history.account(5, 6, 7)
    history.publish(events[0], events[2])
    history.sink(**{events[0].account: 5 + 7})
    report = check.check(topic)
    assert report.lost == [events[1].id]
    assert report.gaps == 1
    assert "1 events are lost" in report.findings[0]
    sink = report.sink(SINK)
    assert (sink.lost, sink.in_flight, sink.drift) == (1, 0, {}), "what never came to it is no drift of its own"
    assert report.settled
    assert "agrees with the ledger; 0 in flight, 0 parked, 1 lost" in describe(report)


@pytest.mark.parametrize("name", ["dedup", "upsert"])
def test_an_event_that_carries_the_state_makes_up_for_those_before_it(
    topic: Settings, history: History, name: str
) -> None:
    parked, lost = history.account(5, 6, 7), history.account(1, 2, 3)
    history.publish(*parked, lost[0], lost[2])
    history.name, history.version = name, 3
    history.set_aside(parked[1])
    history.sink(**{parked[0].account: 5 + 6 + 7, lost[0].account: 1 + 2 + 3})
    sink = check.check(topic).sink(name)
    assert (sink.parked, sink.lost) == (1, 1), "told all the same"
    # Under dedup, who has these amounts has applied what was set aside, and what never came.
    assert sink.drift == ({} if name == "upsert" else {parked[0].account: 6, lost[0].account: 2})


def test_what_the_topic_does_not_have_is_in_flight_until_a_later_event_of_its_account_is_there(
    topic: Settings, history: History
) -> None:
    events = history.account(5, 6, 7)
    history.publish(events[0])
    history.sink(**{events[0].account: 5})
    report = check.check(topic)
    assert (report.in_flight, report.lost) == (2, [])
    assert (report.sink(SINK).in_flight, report.sink(SINK).drift) == (2, {})
    assert not report.settled


def test_what_a_sink_has_not_read_yet_is_in_flight_and_no_drift(topic: Settings, history: History) -> None:
    events = history.account(5, 6)
    history.publish(*events)
    history.sink(next_offset=1, **{events[0].account: 5})
    report = check.check(topic)
    assert (report.in_flight, report.sink(SINK).in_flight, report.sink(SINK).drift) == (0, 1, {})


@pytest.mark.parametrize("surplus", [3, -4])
def test_a_balance_that_is_off_is_drift_of_that_account(topic: Settings, history: History, surplus: int) -> None:
    right, wrong = history.account(5), history.account(6)
    history.publish(*right, *wrong)
    history.sink(**{right[0].account: 5, wrong[0].account: 6 + surplus})
    report = check.check(topic)
    assert report.sink(SINK).drift == {wrong[0].account: surplus}
    assert report.sink(SINK).drift_total == abs(surplus)
    assert report.findings == [f"sink {SINK} drifts by {abs(surplus)} in 1 accounts"]


def test_opposite_drifts_do_not_cancel(topic: Settings, history: History) -> None:
    one, other = history.account(5), history.account(6)
    history.publish(*one, *other)
    history.sink(**{one[0].account: 7, other[0].account: 4})
    assert check.check(topic).sink(SINK).drift_total == 4


def test_an_event_that_was_set_aside_is_parked_and_no_drift(topic: Settings, history: History) -> None:
    events = history.account(5, 6)
    history.publish(*events)
    history.sink(**{events[0].account: 5})
    history.set_aside(events[1])
    report = check.check(topic)
    assert (report.sink(SINK).parked, report.sink(SINK).drift) == (1, {})
    assert report.findings == [f"sink {SINK} has set 1 events aside"]


def test_what_is_in_a_balance_taken_from_the_ledger_is_applied_wherever_it_is(
    topic: Settings, history: History
) -> None:
    events = history.account(5, 6, 7, 8)
    history.publish(*events[:2])
    history.sink(next_offset=1, **{events[0].account: 5 + 6 + 7})
    history.set_aside(events[0])
    history.rebuilt(version=3)
    report = check.check(topic)
    assert report.in_flight == 2, "not on the topic yet: the third, which the sink has, and the fourth"
    sink = report.sink(SINK)
    assert (sink.in_flight, sink.parked, sink.drift) == (1, 0, {})


def test_what_was_pruned_before_a_sink_has_read_it_is_in_flight_and_no_drift(topic: Settings, history: History) -> None:
    events = history.account(5, 6, 7)
    history.publish(*events, events[1])
    history.sink(next_offset=1, **{events[0].account: 5})
    history.prune(*events[:2])
    report = check.check(topic)
    assert (report.in_flight, report.lost, report.unknown) == (0, [], 2)
    assert (report.sink(SINK).in_flight, report.sink(SINK).drift) == (2, {})
    assert not report.settled
    history.prune(events[2])
    assert check.check(topic).sink(SINK) == report.sink(SINK)


def test_what_was_pruned_and_is_set_aside_is_parked_and_no_drift(topic: Settings, history: History) -> None:
    events = history.account(5, 6)
    history.publish(*events)
    history.sink(**{events[0].account: 5})
    history.set_aside(events[1])
    history.prune(*events)
    report = check.check(topic)
    assert (report.sink(SINK).parked, report.sink(SINK).in_flight, report.sink(SINK).drift) == (1, 0, {})
    assert report.findings == [f"sink {SINK} has set 1 events aside"]


def test_drift_is_seen_also_where_everything_was_pruned(topic: Settings, history: History) -> None:
    events = history.account(5, 6)
    history.publish(*events)
    history.sink(**{events[0].account: 5})
    history.prune(*events)
    assert check.check(topic).sink(SINK).drift == {events[0].account: -6}


def test_what_has_left_the_topic_by_retention_is_neither_in_flight_nor_drift(topic: Settings, history: History) -> None:
    old, quiet, live = history.account(5, 6), history.account(7), history.account(8)
    history.publish(old[0], quiet[0])
    history.publish(old[1], live[0])
    history.sink(**{old[0].account: 11, quiet[0].account: 7, live[0].account: 8})
    history.age_out(records=3)  # two events and a marker
    report = check.check(topic)
    assert (report.records, report.in_flight, report.lost) == (2, 0, [])
    assert (report.sink(SINK).in_flight, report.sink(SINK).drift) == (0, {})


def test_a_record_that_is_no_event_is_counted_apart(topic: Settings, history: History) -> None:
    history.publish_raw(b"{")
    report = check.check(topic)
    assert (report.records, report.malformed, report.duplicates) == (1, 1, 0)


def test_waiting_for_what_never_arrives_ends_at_the_deadline(topic: Settings, history: History) -> None:
    history.account(5)
    with pytest.raises(WaitTimeoutError, match="nothing to be in flight"):
        check.check_settled(topic, timeout_s=0.5)
