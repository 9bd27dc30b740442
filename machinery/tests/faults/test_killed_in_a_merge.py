"""The sink `lakehouse` on a Spark cluster, killed in the middle of a MERGE: a worker, and the driver.

Within the MERGE a task stands still and names its process. So what is killed has the task at that moment, and the table
has no commit of that MERGE.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from deltalake import DeltaTable

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.sink.lakehouse import table
from outbox.stack.command import SinkCommand
from outbox.stack.process import Process
from outbox.stack.stack import Stack
from outbox.testing.fixtures.stack import private_stack
from outbox.testing.homes import Homes
from tests.support import faulty_sink
from tests.support.faulty_sink import held_folder, held_merge
from tests.support.made_events import Event
from tests.support.paths import ROOT
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up_alone, sink_arguments, wait_applied

pytestmark = pytest.mark.cluster

NAME = "lakehouse"
WORKERS = ("spark-worker-1", "spark-worker-2")
TIMEOUT_S = 300
MANY = 20_000  # events: a batch of two tasks


class HeldSink(SinkCommand):
    """The sink whose MERGE can be held up, with a JVM of its own."""

    start_timeout_s = TIMEOUT_S

    def __init__(self, settings: Settings) -> None:
        super().__init__(f"sink-{settings.topic_prefix}", settings, sink_arguments(NAME))

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", faulty_sink.__name__, held_merge.__name__, *self._arguments]

    def env(self) -> Mapping[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return {**super().env(), "PYTHONPATH": path}


@pytest.fixture(scope="module")
def cluster(homes: Homes) -> Iterator[Stack]:
    """A master and two workers for the tests of this module to break."""
    stack = private_stack(homes.new("cluster"))
    stack.up(only=["spark-master", *WORKERS], workers=len(WORKERS))
    yield stack
    stack.down(gently=False)


@pytest.fixture
def clustered(topic: Settings, cluster: Stack) -> Settings:
    """A topic, and the whole cluster to run sinks on."""
    cluster.up(only=WORKERS)
    found = cluster.settings
    own = {"spark_master": found.spark_master, "spark_properties": found.stack_spark_properties}
    return topic.model_copy(update=own)


@contextmanager
def running_held(settings: Settings) -> Iterator[HeldSink]:
    sink = HeldSink(settings)
    sink.spawn()
    try:
        yield sink
    except BaseException:
        print(sink.tail(30))  # noqa: T201
        raise
    finally:
        sink.kill()


def delta(settings: Settings) -> DeltaTable:
    return DeltaTable(table.location(settings, NAME).removeprefix("file://"))


def merges(worker: Process, settings: Settings) -> bool:
    """Whether a task on this worker stands still within a MERGE."""
    there = {file.name for file in held_folder(settings).iterdir()}
    return any(str(process.pid) in there for process in worker.processes())


@contextmanager
def within_a_merge(
    settings: Settings, cluster: Stack, publisher: Publisher, some: Sequence[Event]
) -> Iterator[Process]:
    """One of the workers stands still within a MERGE of these events until the end of the block."""
    held_folder(settings).mkdir()
    before, workers = delta(settings).version(), [cluster.part(name) for name in WORKERS]
    publisher.send(some)
    worker = wait_for(
        "a task within the MERGE",
        lambda: next((one for one in workers if merges(one, settings)), None),
        timeout_s=TIMEOUT_S,
    )
    yield worker
    assert delta(settings).version() == before, "the MERGE has not been committed"
    held_folder(settings).rename(f"{held_folder(settings)}.gone")


def assert_each_once(settings: Settings, some: Sequence[Event]) -> None:
    ids = delta(settings).to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist()
    assert sorted(ids) == sorted(event.event_id for event in some)
    assert Database(settings, NAME).staging_tables() == []
    assert not Path(f"{table.location(settings, NAME).removeprefix('file://')}.staging").exists()


def test_a_worker_killed_within_a_merge_loses_and_repeats_nothing(
    clustered: Settings, cluster: Stack, publisher: Publisher
) -> None:
    some, database = publisher.events(2 * MANY), Database(clustered, NAME)
    publisher.send(some[:MANY])
    with running_held(clustered) as sink:
        wait_applied(sink, database, MANY, TIMEOUT_S)
        with within_a_merge(clustered, cluster, publisher, some[MANY:]) as worker:
            worker.kill()
        wait_applied(sink, database, 2 * MANY, TIMEOUT_S)
        sink.stop()
    assert_each_once(clustered, some)


def test_a_driver_killed_within_a_merge_loses_and_repeats_nothing(
    clustered: Settings, cluster: Stack, publisher: Publisher
) -> None:
    some, database = publisher.events(2 * MANY), Database(clustered, NAME)
    publisher.send(some[:MANY])
    with running_held(clustered) as sink:
        wait_applied(sink, database, MANY, TIMEOUT_S)
        before = database.positions()
        with within_a_merge(clustered, cluster, publisher, some[MANY:]) as worker:
            held = [psutil.Process(int(file.name)) for file in held_folder(clustered).iterdir()]
            sink.kill()
            assert worker.is_running()
        assert database.positions() == before
        done = catch_up_alone(clustered, NAME)
        assert done.returncode == 0, done.stderr
        assert_each_once(clustered, some)
        # What the killed driver's tasks have written since is no part of the table.
        assert psutil.wait_procs(held, timeout=TIMEOUT_S)[1] == []
    assert_each_once(clustered, some)
