"""Several sinks of one process: what the failure of one, at its start or its stop, does to the others."""

from __future__ import annotations

import json

import pytest

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from tests import transforms
from tests.support import faulty_sink
from tests.support.made_events import sums
from tests.support.sink_driver import Database, open_sink
from tests.support.sink_process import (
    TIMEOUT_S,
    Publisher,
    catch_up,
    checkpoint,
    logged,
    reported_failure,
    running_faulty,
    running_warm,
    wait_applied,
)
from tests.support.topic_reader import topic_of
from tests.support.warm_jvm import WarmJvm


@pytest.fixture
def unusable_checkpoint(topic: Settings) -> str:
    """A sink whose checkpoint cannot be used: its path is taken by a file."""
    file = checkpoint(topic, "naive")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("")
    return "naive"


@pytest.fixture
def other_topic(topic: Settings) -> str:
    """A sink that has read an earlier topic of the same name."""
    with open_sink(topic, "upsert") as sink:
        sink.begin_at({topic_of(topic): {0: 0}}, {topic_of(topic): "another-id"})
    return "upsert"


def test_sinks_that_cannot_start_do_not_stop_their_neighbours(
    topic: Settings, publisher: Publisher, database: Database, unusable_checkpoint: str, other_topic: str
) -> None:
    some = publisher.events(20)
    publisher.send(some)
    done = catch_up(topic, unusable_checkpoint, other_topic, "dedup")
    assert reported_failure(done).startswith(f"outbox: checkpoint {topic.checkpoints}/{unusable_checkpoint}: ")
    failed = {str(line["sink"]): line["code"] for line in logged(done, "sink failed")}
    assert failed == {unusable_checkpoint: "checkpoint-unusable", other_topic: "topic-recreated"}
    assert database.totals() == sums(some)


def test_a_sink_that_cannot_start_releases_its_fence(
    topic: Settings, publisher: Publisher, database: Database, unusable_checkpoint: str
) -> None:
    publisher.send(publisher.events(20))
    with running_warm(topic, unusable_checkpoint, "dedup") as sinks:
        wait_applied(sinks, database, 20)
        with open_sink(topic, unusable_checkpoint):
            assert sinks.is_running()


def test_a_sink_that_does_not_stop_in_time_fails(topic: Settings, publisher: Publisher, database: Database) -> None:
    publisher.send(publisher.events(20))
    with running_faulty(faulty_sink.commit_unseen.__name__, topic, "naive", "dedup") as sinks:
        wait_applied(sinks, database, 20)
        wait_applied(sinks, Database(topic, "naive"), 20)
        sinks.stop()
        ended = sinks.tail(10)
    assert "outbox: waited 1 s for batch 0 of sink naive to be committed" in ended
    lines = [json.loads(line) for line in ended.splitlines() if line.startswith("{")]
    assert [line["sink"] for line in lines if line["event"] == "stopped"] == ["dedup"]
    assert "Traceback" not in ended


def test_an_apply_that_fails_during_a_stop_is_a_failure(topic: Settings, publisher: Publisher) -> None:
    publisher.send(publisher.events(20))
    with running_faulty(faulty_sink.failure_during_stop.__name__, topic, "dedup") as sink:
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
        assert sink.tail(1) == f"outbox: {faulty_sink.REFUSED}"
    assert Database(topic).applied() == 0


def test_a_stop_while_a_transform_runs_is_no_error(topic: Settings, publisher: Publisher, database: Database) -> None:
    """Spark once looked for an interruption in a long message of the JVM, and overflowed its stack."""
    jvm = WarmJvm(topic)
    jvm.start()
    begin = jvm.log_file.stat().st_size

    def said() -> str:
        return jvm.log_file.read_bytes()[begin:].decode()

    publisher.send(publisher.events(20))
    with running_faulty(faulty_sink.endless_transform.__name__, topic, "dedup") as sink:
        wait_for("the transform to begin", lambda: transforms.BEGUN in said(), timeout_s=TIMEOUT_S)
        sink.stop()
        assert not any(word in sink.tail(100) for word in ("outbox: ", "Exception", "Traceback", '"error"'))
    assert "StackOverflowError" not in said()  # Spark itself may log that a killed task's broadcast is gone already
    assert database.applied() == 0


def test_a_stop_before_apply_leaves_the_batch_to_the_next_start(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(20)
    publisher.send(some)
    with running_faulty(faulty_sink.stop_before_apply.__name__, topic, "dedup") as sink:
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
    assert database.applied() == 0
    done = catch_up(topic)
    assert done.returncode == 0, done.stderr
    assert logged(done, "another checkpoint begins") == [], "Spark has not recorded the batch"
    assert database.totals() == sums(some)
