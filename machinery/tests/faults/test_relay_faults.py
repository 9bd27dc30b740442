"""The relay at its faults that the soak does not have: a hanging transaction, and life without exactly-once.

Each test shows that its fault fired: a killed part was in the middle of work, or the test would say nothing. The test
with exactly-once comes first, because each switch restarts the worker.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import requests

from outbox.audit.doctor import examine
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.relay import connectors, lifecycle, offsets, rest
from outbox.relay.rest import Rest, is_repeatable
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import Stack
from tests.support.outbox_rows import Writer, ids, insert, row, unfinished_transaction, writing
from tests.support.topic_reader import Log, Record, duplicates, out_of_order, relayed, topic_of

CONTROL_BATCH = 0x20  # in a batch's attributes: https://kafka.apache.org/documentation/#recordbatch
CLIENTS = 4  # at once, of the worker
PROGRESS = 300  # events: how far a part must have got before it is killed again
PAUSE_S = 0.02  # between the writer's transactions: a worker that starts again has to catch up with all of them


def switched(stack: Stack, exactly_once: bool) -> Settings:
    """The stack with its one switch so, its connector applied."""
    settings = stack.settings.replace(exactly_once=exactly_once)
    Stack(settings).up()
    lifecycle.apply(settings)
    status = lifecycle.status(settings)
    assert status.worker_exactly_once is exactly_once
    assert status.connector_exactly_once == ("required" if exactly_once else "requested")
    assert status.mode.startswith("exactly-once" if exactly_once else "at-least-once")
    return settings


def problems(settings: Settings) -> set[str]:
    """The codes of the problems that doctor finds."""
    return {one.code for one in examine(settings) if not one.is_ok}


@contextmanager
def load(settings: Settings) -> Iterator[tuple[Writer, Log]]:
    """A write load, and the topic being read; it is relaying before anything else happens."""
    seed = int(os.environ.get("OUTBOX_TEST_SEED", random.SystemRandom().randrange(10**6)))
    log = Log(settings)
    start = len(log.read())
    try:
        with unfinished_transaction(settings), writing(settings, seed, PAUSE_S) as writer:
            wait_for("the load to be relayed", lambda: len(log.read()) > start + PROGRESS, timeout_s=60)
            yield writer, log
    finally:
        log.close()


def kill_in_mid_stream(part: Process, settings: Settings, log: Log) -> None:
    """Kill a part that has relayed since it started, while committed rows wait for it."""
    start = len(log.read())
    wait_for("it to relay", lambda: len(log.read()) > start + PROGRESS, timeout_s=60)
    part.pause()  # whatever it was at; what it has not relayed can be counted before it dies
    wait_for("rows to wait", lambda: set(ids(settings)) - {record.id for record in log.read()}, timeout_s=30)
    [main] = [process for process in part.processes() if process.pid == part.pid()]
    part.kill()
    assert not psutil.pid_exists(main.pid) or main.status() == psutil.STATUS_ZOMBIE


def settled(settings: Settings) -> list[Record]:
    """All that is on the topic once nothing of the load can come any more."""
    relayed(settings, timeout_s=120)
    partitions: set[int] = set()
    partitions_due = topics.describe(settings, topic_of(settings)).partitions

    def marked() -> list[Record] | None:
        """The task relays in order, also what it repeats: behind events on every partition comes nothing of before."""
        markers = [row() for _ in range(partitions_due)]
        insert(settings, *markers)
        records = relayed(settings)
        keys = {marker.aggregateid for marker in markers}
        partitions.update(record.partition for record in records if record.key in keys)
        return records if len(partitions) == partitions_due else None

    return wait_for("a new event on every partition", marked, timeout_s=120)


def assert_nothing_lost(settings: Settings, records: list[Record]) -> None:
    written = ids(settings)
    assert {record.id for record in records} == set(written)
    assert len(written) > PROGRESS
    assert out_of_order(records) == []


def cut_last_marker(partition: Path) -> bool:
    """Cut the last batch off a partition's log if it is the end of a transaction. The broker must not run."""
    log = partition / "00000000000000000000.log"
    data, begin, following = log.read_bytes(), 0, 0
    while following < len(data):
        begin, following = following, following + 12 + int.from_bytes(data[following + 8 : following + 12])
    attributes = int.from_bytes(data[begin + 21 : begin + 23])
    os.truncate(log, begin)
    for snapshot in partition.glob("*.snapshot"):
        snapshot.unlink()  # else the broker would take the state of the transaction from there
    return bool(attributes & CONTROL_BATCH)


def test_a_transaction_left_hanging_by_a_killed_broker_is_released(
    home_stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker of the last commit is cut off the log of the offsets, as if the broker had never written it."""
    settings = switched(home_stack, True)
    before = duplicates(relayed(settings, []))
    with unfinished_transaction(settings):
        for _ in range(2):  # the offset of the first is the one to continue from
            insert(settings, row())
            relayed(settings)
        home_stack.part("kafka").kill()
        [folder] = settings.home.rglob("outbox.offsets-0")
        assert cut_last_marker(folder)
        Stack(settings).up()
        monkeypatch.setattr(offsets, "END_TIMEOUT_S", 5)
        wait_for("doctor to find it", lambda: "transaction-hanging" in problems(settings), timeout_s=60, poll_s=0.5)
        released = list[str]()
        assert lifecycle.apply(settings, on_release=lambda: released.append("once")) == "restarted"
        assert released == ["once"]
    assert "transaction-hanging" not in problems(settings)
    insert(settings, row())
    records = settled(settings)
    assert {record.id for record in records} == set(ids(settings))
    assert duplicates(records) >= before
    assert lifecycle.apply(settings) == "unchanged"


def test_requests_that_connect_asks_to_repeat_are_repeated(home_stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector that comes or goes makes the group rebalance. What waits at the worker meanwhile is refused."""
    settings = switched(home_stack, True)
    ours = connectors.load(settings)
    other = replace(ours, name="other")
    wanted, repeated = Rest(settings).config(), list[str]()

    def noted(response: requests.Response) -> bool:
        is_due = is_repeatable(response)
        if is_due:
            repeated.append(response.text)
        return is_due

    def come_and_go() -> bool:
        with ThreadPoolExecutor(CLIENTS) as clients:
            reads = [clients.submit(Rest(settings).config) for _ in range(20 * CLIENTS)]
            assert Rest(settings, other).create_stopped(ours.config) is None
            Rest(settings, other).delete()
        assert all(read.result() == wanted for read in reads)
        return bool(repeated)

    monkeypatch.setattr(rest, "is_repeatable", noted)
    wait_for("Connect to ask to repeat a request", come_and_go, timeout_s=120, poll_s=0)
    insert(settings, row())
    assert {record.id for record in relayed(settings)} == set(ids(settings))


def test_killed_worker_at_least_once_repeats_but_loses_nothing(home_stack: Stack) -> None:
    settings = switched(home_stack, False)
    before = duplicates(relayed(settings, []))
    with load(settings) as (_, log):
        kill_in_mid_stream(home_stack.part("connect"), settings, log)
        Stack(settings).up()
        lifecycle.apply(settings)
    records = settled(settings)
    assert_nothing_lost(settings, records)
    assert duplicates(records) > before


def test_switching_off_and_on_and_off_under_load_loses_nothing(home_stack: Stack) -> None:
    settings = switched(home_stack, False)
    with load(settings) as (_, log):
        for exactly_once in (True, False):
            settings = switched(home_stack, exactly_once)
            start = len(log.read())
            wait_for("it to relay in this mode", lambda: len(log.read()) > start + PROGRESS, timeout_s=60)  # noqa: B023
    assert_nothing_lost(settings, settled(settings))
