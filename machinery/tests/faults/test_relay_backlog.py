"""A backlog of large events that does not fit into the Connect worker's heap: it is relayed, from the log and by a
snapshot.
"""

from __future__ import annotations

import json
import os

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import records, topics
from outbox.relay import lifecycle
from outbox_lab.stack.connect import Connect
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from tests.support.outbox_rows import Row, ids, insert
from tests.support.topic_reader import topic_of

PAYLOAD_BYTES = 900_000
HEAP_BYTES = int(Connect.heap.removesuffix("m")) << 20
ROWS = 1 + HEAP_BYTES // PAYLOAD_BYTES


def large(number: int) -> Row:
    """A row of a size that is allowed, and that compression does not help with."""
    return Row("item", f"{number}", "received", json.dumps({"text": os.urandom(PAYLOAD_BYTES // 2).hex()}))


def wait_relayed(settings: Settings, worker: Process, first: dict[int, int]) -> None:
    """Wait until every row is on the topic behind these offsets. Fails at once if the worker ends."""
    found: set[bytes] = set()

    def read_on() -> bool:
        assert worker.is_running(), worker.tail()
        end = topics.last_stable_offsets(settings, topic_of(settings))
        for message in records.read(settings, topic_of(settings), {one: (first[one], end[one]) for one in end}):
            found.add(bytes(dict(message.headers() or [])["id"]))  # type: ignore[arg-type]  # stubs are wider
        first.update(end)
        return {name.decode() for name in found} >= set(ids(settings))

    wait_for("the backlog to be relayed", read_on, timeout_s=300)


def test_a_backlog_larger_than_the_heap_of_the_worker_is_relayed(home_stack: Stack) -> None:
    settings = home_stack.settings
    lifecycle.apply(settings)
    worker = home_stack.part("connect")
    worker.stop()
    for number in range(ROWS):
        insert(settings, large(number))
    first = topics.last_stable_offsets(settings, topic_of(settings))
    worker.start()
    wait_relayed(settings, worker, first)

    lifecycle.remove(settings, drop_slot=True)
    first = topics.last_stable_offsets(settings, topic_of(settings))
    lifecycle.apply(settings)  # a snapshot of all rows
    wait_relayed(settings, worker, first)
