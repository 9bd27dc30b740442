"""Sinks of tests share a JVM: whatever ends one of them, the next one gets a JVM that works."""

from __future__ import annotations

import psutil

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from tests.support.made_events import sums
from tests.support.sink_driver import Database
from tests.support.sink_process import TIMEOUT_S, Publisher, catch_up, logged, running_warm, wait_applied
from tests.support.warm_jvm import WarmJvm


def java(settings: Settings) -> psutil.Process:
    """The JVM that the runs share."""
    (found,) = (process for process in WarmJvm(settings).processes() if process.name() == "java")
    return found


def test_runs_share_a_jvm_and_neither_settings_nor_strategies(topic: Settings) -> None:
    publisher = Publisher(topic)
    some = publisher.events(40)
    publisher.send(some[:20])
    first = catch_up(topic.model_copy(update={"log_level": "error"}), "dedup", "naive")
    assert (first.returncode, first.stderr) == (0, "")
    before = java(topic)
    publisher.send(some[20:])
    second = catch_up(topic)
    assert second.returncode == 0, second.stderr
    assert {line["sink"] for line in logged(second, "applied")} == {"dedup"}
    assert java(topic) == before
    assert Database(topic).totals() == sums(some)
    assert Database(topic, "naive").totals() == sums(some[:20])


def test_a_run_that_dies_or_whose_jvm_dies_leaves_none_to_the_next(topic: Settings) -> None:
    publisher, database = Publisher(topic), Database(topic)
    some = publisher.events(40)
    publisher.send(some[:20])
    with running_warm(topic) as sink:
        wait_applied(sink, database, 20)
        sink.kill()  # its Spark context stays behind in the JVM
    assert WarmJvm(topic).processes() == []

    publisher.send(some[20:])
    done = catch_up(topic)
    assert done.returncode == 0, done.stderr
    assert database.totals() == sums(some)

    with running_warm(topic) as sink:
        wait_for("it to start", lambda: '"started"' in sink.tail(1), timeout_s=TIMEOUT_S)
        java(topic).kill()
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=TIMEOUT_S)
    wait_for("the rest of it to end", lambda: not WarmJvm(topic).processes(), timeout_s=TIMEOUT_S)
