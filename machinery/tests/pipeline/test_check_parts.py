"""A large topic is read in parts, by several processes: together they have what one read of everything has. Any of them
may die.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Producer

from outbox.audit import declared, topic_log
from outbox.audit.topic_log import TopicLogs
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka.clients import client_config
from outbox_lab.testing.command import environment
from outbox_lab.testing.helpers import chosen_seed
from tests.support.made_events import uuid7
from tests.support.topic_reader import topic_of

RECORDS = 400
READ_AND_STAND_STILL = """
import multiprocessing
import time

from outbox.audit import declared, topic_log
from outbox.audit.topic_log import TopicLogs
from outbox.base.settings import load

if __name__ == "__main__":
    settings = load()
    topic_log.PART_OFFSETS = 1
    log = TopicLogs(declared.load(settings).topics)

    def stand_still(_):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        time.sleep(3600)

    log.read_on(settings, stand_still)
"""


@pytest.fixture
def filled(topic: Settings) -> Settings:
    """Two topics, each with events, duplicates and garbage in two partitions, some of it aborted."""
    chance = random.Random(chosen_seed())  # noqa: S311
    producer = Producer({**client_config(topic), "transactional.id": f"test-{uuid.uuid4()}"})
    producer.init_transactions(30)
    items = [str(uuid.UUID(int=number)) for number in range(5)]
    ids = [uuid7(chance) for _ in range(RECORDS // 2)]
    for begin in range(0, RECORDS, 40):
        producer.begin_transaction()
        for version in range(begin, begin + 40):
            item = chance.choice(items)
            value = {
                "movement_id": item,
                "item_id": item,
                "quantity": chance.choice([1, 2, "3"]),
                "unit": "KGM",
                "stock_after": 0,
                "version": version + 1,
                "occurred_at": "2026-11-21T10:00:00.123456Z",
            }
            headers: dict[str, str | bytes | None] = {"eventType": "received", "schemaVersion": "1"}
            if chance.random() < 0.9:
                headers["id"] = chance.choice(ids)
            name = topic_of(topic, chance.choice(["item", "item", "order"]))
            producer.produce(name, json.dumps(value), item, headers=headers, partition=chance.randrange(2))
        producer.flush(30)
        if chance.random() < 0.8:
            producer.commit_transaction(30)
        else:
            producer.abort_transaction(30)
    return topic


def contents(settings: Settings, progress: Callable[[str], None] = lambda _: None) -> tuple[object, ...]:
    """All that the logs have, read from the beginning of the topics. They show their progress after each piece."""
    with closing(TopicLogs(declared.load(settings).topics)) as logs:
        logs.read_on(settings, progress)
        columns = "* REPLACE (masked(id) AS id)"
        rows = [
            list(logs.store.rows(f'SELECT {columns} FROM {table} ORDER BY topic, partition, "offset"'))
            for table in ("delivered", "refused")
        ]
        return logs.records, [(end.records, end.next_offsets) for end in logs.ends], rows


@pytest.fixture
def whole(filled: Settings) -> tuple[object, ...]:
    """The result of one read of everything."""
    return contents(filled)


def test_a_small_topic_is_read_by_one_process(filled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(topic_log, "_process")
    assert contents(filled)[0]


def test_many_parts_have_what_one_has(
    filled: Settings, whole: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_log, "PART_OFFSETS", 37)
    assert contents(filled) == whole
    assert not multiprocessing.active_children()


def test_a_part_that_does_not_fit_into_memory_comes_in_pieces(
    filled: Settings, whole: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_log, "PART_MAX_BYTES", 0)
    monkeypatch.setattr("outbox.kafka.records.BATCH_RECORDS", 10)
    pieces: list[str] = []
    assert contents(filled, pieces.append) == whole
    assert len(pieces) > 10


def test_a_killed_process_is_a_failure(filled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_log, "PART_OFFSETS", 1)

    def kill(_: str) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with closing(TopicLogs(declared.load(filled).topics)) as logs, pytest.raises(Failure) as failure:
        logs.read_on(filled, kill)
    assert failure.value.code == "process-ended"
    assert not multiprocessing.active_children()


def test_a_failure_in_a_process_is_the_failure_of_the_check(filled: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TIMEOUT_SCALE", "0.1")
    away = filled.model_copy(update={"topic_prefix": f"missing-{uuid.uuid4()}"})
    monkeypatch.setattr(topic_log, "PART_OFFSETS", 1)
    with pytest.raises(Failure) as failure:
        list(topic_log.read_parts(declared.load(away).topics, away, {0: {0: (0, 2)}}))
    assert failure.value.code == "topic-silent"
    assert not multiprocessing.active_children()


@pytest.fixture
def standing_still(filled: Settings, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that reads with others, and has received the first part."""
    program = tmp_path / "read.py"
    program.write_text(READ_AND_STAND_STILL)
    process = subprocess.Popen(
        [sys.executable, program],
        env=environment(filled.home, **filled.as_env()),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_no_process_outlives_a_check_that_is_killed(standing_still: subprocess.Popen[str]) -> None:
    assert standing_still.stdout
    children = [psutil.Process(int(pid)) for pid in standing_still.stdout.readline().split()]
    assert len(children) > 1
    standing_still.send_signal(signal.SIGKILL)
    wait_for("its processes to end", lambda: not any(child.is_running() for child in children), timeout_s=30)
