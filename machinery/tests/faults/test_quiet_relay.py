"""A relay that has nothing to do for longer than the broker remembers its producers: a week by default, seconds here.

The broker then refuses the first transaction of the worker's own producer, for its config topic, and that of the task.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from confluent_kafka import TopicPartition

from outbox.audit import monitor
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import consumer
from outbox.maintenance import prune
from outbox.migrations.migrate import migrate
from outbox.relay import lifecycle
from outbox_lab.stack import ports
from outbox_lab.stack.kafka import Kafka
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import WAITS_MS, private_stack
from outbox_lab.testing.homes import Homes
from tests.support.outbox_rows import ids, insert, row
from tests.support.topic_reader import relayed

TRANSACTIONS = "__transaction_state"


class ForgetfulKafka(Kafka):
    """A broker that forgets a transactional id after fifteen seconds.

    For ten of them, Debezium may wait for a slot that the connection of an earlier task still has.
    """

    def properties(self) -> Mapping[str, str]:
        return {
            **super().properties(),
            "transactional.id.expiration.ms": "15000",
            "transaction.remove.expired.transaction.cleanup.interval.ms": "1000",
        }


@pytest.fixture(scope="module")
def stack(homes: Homes) -> Iterator[Stack]:
    stack = private_stack(homes.new("quiet"), **WAITS_MS)
    stack.up(only=["postgres"])
    ForgetfulKafka(stack.settings).start()
    stack.up()
    migrate(stack.settings)
    yield stack
    stack.down(gently=False)


def remembered(settings: Settings) -> set[str]:
    """The transactional ids that the broker remembers."""
    found = dict[str, bool]()
    with consumer(settings, "read_uncommitted") as client:
        for partition, end in topics.high_watermarks(settings, TRANSACTIONS).items():
            client.assign([TopicPartition(TRANSACTIONS, partition, 0)])
            reached = 0
            while reached < end:
                message = client.poll(10)
                assert message is not None
                assert message.error() is None
                reached = (message.offset() or 0) + 1
                found[(message.key() or b"")[4:].decode()] = message.value() is not None  # behind version and length
    return {name for name, is_known in found.items() if is_known}


def forgotten(settings: Settings) -> None:
    """Wait until the broker has forgotten all."""

    def is_forgotten() -> bool:
        return topics.exists(settings, TRANSACTIONS) and not remembered(settings)

    wait_for("the broker to forget", is_forgotten, timeout_s=90, poll_s=0.5)


def quiet(settings: Settings) -> str:
    """Write an event after the broker has forgotten the connector's task; returns the error with which it fails."""
    forgotten(settings)
    insert(settings, row())
    return wait_for("the task to fail", lambda: lifecycle.status(settings).error, timeout_s=60)


def test_apply_repeats_requests_for_which_the_worker_was_forgotten(stack: Stack) -> None:
    settings = stack.settings
    forgotten(settings)
    assert lifecycle.apply(settings) == "created"
    insert(settings, row())
    relayed(settings)
    assert "InvalidPidMappingException" in quiet(settings)
    forgotten(settings)
    assert lifecycle.apply(settings) == "restarted"
    assert sorted(record.id for record in relayed(settings)) == ids(settings)


def test_monitor_restarts_a_task_that_was_forgotten(stack: Stack) -> None:
    [port] = ports.choose(0)
    settings = stack.settings
    lifecycle.apply(settings)
    error, lines, ended = quiet(settings), list[str](), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(monitor.serve, settings, ("127.0.0.1", port), 3600, lines.append, ended)
        try:
            records = relayed(settings)
            metrics = requests.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
        finally:
            ended.set()
        serving.result()
    assert sorted(record.id for record in records) == ids(settings)
    assert f'outbox_connector_restarts_total{{connector="{settings.connector}"}} 1.0' in metrics
    assert f"connector {settings.connector}: its task had failed and is restarted: {error}" in lines
    assert lifecycle.status(settings).is_running


def test_markers_of_prune_keep_the_task_in_use(stack: Stack) -> None:
    settings = stack.settings
    lifecycle.apply(settings)
    task = f"{settings.connect_group_id}-{settings.connector}-0"

    def others_are_forgotten() -> bool:
        prune.prune(settings, keep_hours=24)
        return remembered(settings) == {task}

    wait_for("the broker to forget the worker", others_are_forgotten, timeout_s=90, poll_s=0.5)
    insert(settings, row())
    assert sorted(record.id for record in relayed(settings)) == ids(settings)
    assert lifecycle.status(settings).is_running
