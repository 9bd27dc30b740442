"""Checkpoints in a file system that is not of this host: HDFS."""

from __future__ import annotations

import pytest

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.sink.repair import rewind
from tests.fixtures.hdfs import NameNode
from tests.support.made_events import sums
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    TIMEOUT_S,
    Publisher,
    catch_up,
    catch_up_alone,
    logged,
    reported_failure,
    running,
    wait_applied,
)

pytestmark = pytest.mark.cluster


@pytest.fixture
def remote(topic: Settings, name_node: NameNode) -> Settings:
    """A topic whose sinks keep their checkpoints in HDFS."""
    return topic.model_copy(update={"sink_checkpoints": f"{name_node.uri}/check points/{topic.topic_prefix}"})


def test_a_killed_sink_continues_where_its_remote_checkpoint_says(remote: Settings, database: Database) -> None:
    publisher = Publisher(remote)
    some = publisher.events(420)
    publisher.send(some[:200])
    with running(remote) as sink:
        wait_applied(sink, database, 200)
        publisher.send(some[200:400])
        wait_applied(sink, database, 201)
        sink.kill()
    publisher.send(some[400:])

    again = catch_up(remote)
    assert again.returncode == 0, again.stderr
    [started] = logged(again, "started")
    assert started["checkpoint"] == f"{remote.sink_checkpoints}/dedup"
    assert int(str(logged(again, "applied")[0]["batch"])) > 0, "a query without its checkpoint begins with batch 0"
    assert database.totals() == sums(some)

    rewind.rewind(remote, "dedup", rewind.to_earliest(remote, "dedup"))
    rewound = catch_up(remote)
    assert rewound.returncode == 0, rewound.stderr
    assert sum(int(str(line["duplicates"])) for line in logged(rewound, "applied")) == len(some)
    assert database.totals() == sums(some)


def test_a_silent_file_system_is_reported_and_loses_nothing(
    remote: Settings, name_node: NameNode, database: Database
) -> None:
    publisher = Publisher(remote)
    some = publisher.events(40)
    publisher.send(some[:20])
    assert catch_up(remote).returncode == 0
    publisher.send(some[20:])
    name_node.kill()
    failure = reported_failure(catch_up_alone(remote))
    assert failure.startswith(f"outbox: checkpoint {remote.sink_checkpoints}/dedup: ")
    assert "OUTBOX_SINK_CHECKPOINTS" in failure
    name_node.start()
    # The tests' shared JVM may still hold its connection to the killed server.
    done = catch_up_alone(remote)
    assert done.returncode == 0, done.stderr
    assert database.totals() == sums(some)


def test_sink_resumes_when_the_file_system_is_available_again(
    remote: Settings, name_node: NameNode, database: Database
) -> None:
    publisher = Publisher(remote)
    some = publisher.events(40)
    publisher.send(some[:20])
    with running(remote) as sink:
        wait_applied(sink, database, 20)
        name_node.kill()
        publisher.send(some[20:])
        wait_for("two attempts", lambda: sink.tail(50).count("the sink starts again") > 1, timeout_s=TIMEOUT_S)
        assert "checkpoint-unavailable" in sink.tail(50)
        name_node.start()
        wait_applied(sink, database, 40)
    assert database.totals() == sums(some)
