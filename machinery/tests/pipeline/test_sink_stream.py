"""The sink as a process, on real Kafka, Spark and Postgres: what it applies, and what a stop or a kill does to it."""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import psutil
import pytest
import requests
from confluent_kafka import Producer

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink.decoding import dead_records
from outbox.sink.repair import rewind
from outbox.sink.running.metrics import ask_lag
from outbox.sink.spark.reader import DRIVER_MAX_RECORDS
from outbox_lab.stack import ports
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.spark import UI_FILTER, UI_SECRET, ui_header
from tests.support.made_events import nth_key, sums, uuid7
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    RANDOM,
    TIMEOUT_S,
    Publisher,
    catch_up,
    catch_up_plain,
    checkpoint,
    logged,
    reported_failure,
    running,
    running_plain,
    running_warm,
    wait_applied,
)
from tests.support.topic_reader import drop_records, topic_of

Run = Callable[..., CompletedProcess[str]]
Start = Callable[..., AbstractContextManager[SinkProcess]]


@pytest.mark.parametrize("run", [catch_up, catch_up_plain])
def test_everything_committed_is_applied_and_nothing_else(
    topic: Settings, publisher: Publisher, database: Database, run: Run
) -> None:
    some = publisher.events(200)
    publisher.send(some[:100])
    publisher.send(publisher.events(30, keys=9), abort=True)
    publisher.send(some[90:])  # ten of them again
    bad_id = uuid7(RANDOM)
    publisher.send_raw(nth_key(0), b"{", bad_id)
    publisher.send_raw(nth_key(0), None, None)
    publisher.send(publisher.events(30, keys=9), abort=True)

    done = run(topic, "dedup", "naive")

    assert done.returncode == 0, done.stderr
    assert database.totals() == sums(some)
    assert Database(topic, "naive").totals() == sums([*some, *some[90:100]])
    assert database.positions() == topics.last_stable_offsets(topic, topic_of(topic))
    letters = database.dead_letters()
    assert letters.pop(bad_id) == "not JSON"
    assert list(letters.values()) == ["no value"]
    assert sum(int(str(line["duplicates"])) for line in logged(done, "applied") if line["sink"] == "dedup") == 10

    again = run(topic, "dedup", "naive")
    assert again.returncode == 0, again.stderr
    assert logged(again, "applied") == []


def stop_by(sink: SinkProcess, number: signal.Signals) -> None:
    """Stop it by a signal to its Python process alone: all of it ends, in good order."""
    processes = sink.processes()
    processes[0].send_signal(number)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert '"stopped"' in sink.tail()
    assert not any(word in sink.tail(100) for word in ("outbox: ", "Exception", "Traceback", '"error"'))


@pytest.mark.parametrize(
    ("run", "finish"), [(running, catch_up), (running_plain, catch_up_plain)], ids=["spark", "plain"]
)
def test_a_stop_signal_ends_it_after_the_batch_and_its_jvm_with_it(
    topic: Settings, publisher: Publisher, database: Database, run: Start, finish: Run
) -> None:
    some = publisher.events(300)
    publisher.send(some[:100])
    naive = Database(topic, "naive")
    with run(topic, "dedup", "naive") as sink:
        wait_applied(sink, database, 100)
        wait_applied(sink, naive, 100)
        publisher.send(some[100:200])
        wait_applied(sink, database, 101)  # in the middle of it
        assert any(process.name() == "java" for process in sink.processes()) is (run is running)
        stop_by(sink, signal.SIGTERM)
    publisher.send(some[200:])
    done = finish(topic, "dedup", "naive")
    assert done.returncode == 0, done.stderr
    # Even the naive sink is right: a graceful stop repeats nothing.
    assert database.totals() == naive.totals() == sums(some)
    assert sum(int(str(line["duplicates"])) for line in logged(done, "applied")) == 0


def test_second_driver_is_refused_until_the_first_is_killed(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(200)
    publisher.send(some[:100])
    with running(topic) as sink:
        wait_applied(sink, database, 100)
        processes = sink.processes()
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # Spark's helpers come and go
                assert not any("delta" in word for word in process.cmdline()), "nobody asked for it"
        assert "sink dedup already has a driver" in reported_failure(catch_up(topic))
        assert sink.is_running()
        publisher.send(some[100:])
        processes[0].kill()
        assert psutil.wait_procs(processes, timeout=30)[1] == [], "the JVM outlives its driver"
    done = catch_up(topic)
    assert done.returncode == 0, done.stderr
    assert database.totals() == sums(some)


def test_a_jvm_that_dies_ends_the_sink_with_one_clear_line(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    publisher.send(publisher.events(10))
    with running(topic) as sink:
        wait_applied(sink, database, 10)
        next(process for process in sink.processes() if process.name() == "java").kill()
        wait_for("the sink to end", lambda: not sink.is_running(), timeout_s=60)
        assert "outbox: sink dedup: Spark gave up: its JVM is gone" in sink.tail()
        assert "Traceback" not in sink.tail(200)


def test_a_bad_record_is_kept_whole_with_its_coordinates(topic: Settings, database: Database) -> None:
    megabyte = b'{"quantity": "' + b"x" * 10**6 + b'"}'
    ids = [uuid7(RANDOM), uuid7(RANDOM), None]
    bad: list[tuple[bytes | None, bytes, list[tuple[str, str | bytes | None]], str]] = [
        (nth_key(1).encode(), megabyte, [("id", str(ids[0]).encode()), ("odd", b"x")], "unknown event type"),
        (None, b"\xff\x00{", [("id", str(ids[1]).encode()), ("odd", None), ("odd", b"\xfe"), ("", b"")], "not UTF-8"),
        (b"\xfe", b"{}", [], "missing id"),
    ]
    producer = Producer({**client_config(topic), "message.max.bytes": 2 << 20})
    began_at = datetime.now(UTC) - timedelta(minutes=1)
    for number, (key, value, headers, _) in enumerate(bad):
        producer.produce(topic_of(topic), value, key, partition=number, headers=headers)
    assert producer.flush(30) == 0
    done = catch_up(topic)
    assert done.returncode == 0, done.stderr
    columns = 'topic, partition, "offset", event_id::text, reason, key, value, headers, recorded_at'
    kept = database.query(f"SELECT {columns} FROM dead_letters ORDER BY partition")
    for number, (row, (key, value, headers, reason)) in enumerate(zip(kept, bad, strict=True)):
        assert row[:5] == (topic_of(topic), number, 0, ids[number], reason)
        kept_key, kept_value, kept_headers, recorded_at = cast("Any", row[5:])
        assert (kept_key if kept_key is None else bytes(kept_key), bytes(kept_value)) == (key, value)
        assert dead_records.headers(kept_headers) == headers
        assert began_at < recorded_at < datetime.now(UTC) + timedelta(minutes=1)


def test_a_lost_checkpoint_and_one_cut_off_lose_nothing(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(90)
    publisher.send(some[:30])
    assert catch_up(topic, "dedup", "naive").returncode == 0

    # The host lost power: the newest logs of one are empty, and the metadata of another is cut off.
    for log in ("offsets", "commits"):
        max((checkpoint(topic) / log).iterdir(), key=lambda file: int(file.name)).write_text("")
    (checkpoint(topic, "naive") / "metadata").write_text("{")
    publisher.send(some[30:60])
    cut = catch_up(topic, "dedup", "naive")
    assert cut.returncode == 0, cut.stderr
    begun = {str(line["sink"]): line for line in logged(cut, "another checkpoint begins")}
    assert "truncated or missing: " in str(begun["dedup"]["because"])
    assert begun["dedup"]["unusable"] == f"{topic.checkpoints}/dedup"
    assert begun["naive"]["because"] == "truncated or missing: metadata"
    assert checkpoint(topic, "dedup.1").exists()
    assert sum(int(str(line["rows"])) for line in logged(cut, "applied")) == 60, "what was applied is not read again"
    assert database.totals() == Database(topic, "naive").totals() == sums(some[:60])

    # The checkpoints are gone: each begins at its positions, naive at the beginning.
    for name in begun:
        shutil.rmtree(checkpoint(topic, f"{name}.1"))
    publisher.send(some[60:])
    lost = catch_up(topic, "dedup", "naive")
    assert lost.returncode == 0, lost.stderr
    rows: Counter[str] = Counter()
    for line in logged(lost, "applied"):
        rows[str(line["sink"])] += int(str(line["rows"]))
    assert rows == {"dedup": 30, "naive": 90}
    assert database.totals() == sums(some)
    assert Database(topic, "naive").totals() == sums([*some[:60], *some])


def test_empty_database_with_a_used_checkpoint_is_not_a_new_sink(
    topic: Settings, publisher: Publisher, fresh_databases: Callable[[], AbstractContextManager[Settings]]
) -> None:
    some = publisher.events(40)
    publisher.send(some[:20])
    assert catch_up(topic).returncode == 0
    publisher.send(some[20:])
    with fresh_databases() as empty:
        assert catch_up(topic.replace(sink_db_url=empty.sink_db_url)).returncode == 0
        assert Database(empty).totals() == sums(some), "the topic has everything"
    for partition, end in topics.last_stable_offsets(topic, topic_of(topic)).items():
        drop_records(topic, topic_of(topic), end, partition)
    with fresh_databases() as empty:
        done = catch_up(topic.replace(sink_db_url=empty.sink_db_url))
        assert [line["code"] for line in logged(done, "sink failed")] == ["events-lost"]
        assert "were never applied" in reported_failure(done)


def test_a_failure_of_spark_is_reported_in_one_line(topic: Settings, publisher: Publisher, database: Database) -> None:
    planned = checkpoint(topic) / "offsets"
    events = publisher.events(20)
    publisher.send(events[:10])
    with running_warm(topic, "dedup") as sink:
        wait_applied(sink, database, 10)
        shutil.rmtree(planned)
        planned.touch()  # Spark can write no plan into it
        publisher.send(events[10:])
        failure = '"error": "sink dedup: Spark gave up: '
        wait_for("Spark to fail", lambda: failure in sink.tail(100), timeout_s=TIMEOUT_S)
        assert "Traceback" not in sink.tail(100)
        wait_applied(sink, database, 20)  # another query has begun, with another checkpoint


def test_metrics_of_a_running_sink_show_what_it_has_applied(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(40)
    publisher.send(some)
    publisher.send(some[:10])
    publisher.send_raw(nth_key(0), b"{", None)
    publisher.send(publisher.events(30, keys=9), abort=True)
    name = topic_of(topic)
    ends = topics.last_stable_offsets(topic, name)
    markers = {partition: max(0, end - 1) for partition, end in ends.items()}
    asked = {"new": {name: dict[int, int]()}, "done": {name: ends}, "markers": {name: markers}}
    before = ask_lag(topic, asked, TIMEOUT_S)
    assert before is not None
    assert before["new"].offsets == {name: ends}
    assert 0 < before["new"].age_s < TIMEOUT_S
    assert before["done"] == ({name: dict.fromkeys(ends, 0)}, 0.0)
    assert sum(before["markers"].offsets[name].values()) > 0
    assert before["markers"].age_s == 0.0, "behind by no record"

    observed = topic.replace(sink_metrics=f"127.0.0.1:{ports.choose(0)[0]}")
    with running_warm(observed) as sink:
        wait_applied(sink, database, 40)

        def scraped() -> str:
            return requests.get(f"http://{observed.sink_metrics}/metrics", timeout=30).text

        done = 'outbox_sink_lag_events{sink="dedup"} 0.0'
        wait_for("the lag to be 0", lambda: done in scraped(), timeout_s=TIMEOUT_S)
        told = scraped().splitlines()
        for line in (
            'outbox_sink_rows_total{sink="dedup"} 50.0',
            'outbox_sink_duplicates_total{sink="dedup"} 10.0',
            'outbox_sink_dead_letters_total{sink="dedup"} 1.0',
            'outbox_sink_lag_seconds{sink="dedup"} 0.0',
            f'outbox_sink_partition_lag_events{{partition="3",sink="dedup",topic="{topic_of(topic)}"}} 0.0',
            "outbox_sink_kafka_up 1.0",
        ):
            assert line in told


def test_ui_names_jobs_to_its_owner_only_and_ends_by_ctrl_c(
    topic: Settings, publisher: Publisher, database: Database, tmp_path: Path
) -> None:
    publisher.send(publisher.events(DRIVER_MAX_RECORDS + 100))
    [port] = ports.choose(0)
    properties = f"spark.ui.enabled true\nspark.ui.port {port}\nspark.ui.filters {UI_FILTER}\n{UI_SECRET} {'k' * 43}\n"
    file = tmp_path / "spark.properties"
    file.write_text(properties)
    observed = topic.replace(spark_properties=file)
    with running(observed, "dedup", "lakehouse") as sink:
        for one in (database, Database(topic, "lakehouse")):
            wait_applied(sink, one, DRIVER_MAX_RECORDS + 100)
        addresses = {
            connection.laddr.ip
            for process in sink.processes()
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        }
        assert {address.removeprefix("::ffff:") for address in addresses} == {ports.LOOPBACK}
        applications = f"http://{ports.LOOPBACK}:{port}/api/v1/applications"
        assert requests.get(applications, headers={"Host": "evil.example"}, timeout=30).status_code == 403
        [application] = requests.get(applications, headers=ui_header(properties), timeout=30).json()
        jobs_url = f"{applications}/{application['id']}/jobs"
        jobs = requests.get(jobs_url, headers=ui_header(properties), timeout=30).json()
        told = {str(job.get("description")) for job in jobs}
        assert {"dedup: batch 0", "lakehouse: batch 0"} <= told
        # Delta adds words of its own, as it does to jobs of others.
        assert any("lakehouse: batch 0 - MERGE operation" in one for one in told), told
        stop_by(sink, signal.SIGINT)


def test_a_rewind_reads_again_and_the_strategy_decides_what_that_does(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(60)
    publisher.send(some)
    assert catch_up(topic, "dedup", "naive").returncode == 0
    begin = rewind.to_earliest(topic, "dedup")
    assert sum(move.position - move.begin for move in begin.values()) >= 60
    for sink in ("dedup", "naive"):
        assert rewind.rewind(topic, sink, rewind.to_earliest(topic, sink)) == 1
    # The host lost power at the beginning of one replay.
    replay = checkpoint(topic, "dedup.1")
    replay.mkdir()
    (replay / "metadata").write_text("{")
    again = catch_up(topic, "dedup", "naive")
    assert again.returncode == 0, again.stderr
    assert [line["sink"] for line in logged(again, "another checkpoint begins")] == ["dedup"]
    assert sum(int(str(line["duplicates"])) for line in logged(again, "applied") if line["sink"] == "dedup") == 60
    assert database.totals() == sums(some)
    assert Database(topic, "naive").totals() == sums([*some, *some])
    assert logged(catch_up(topic, "dedup"), "applied") == [], "once, not at every start"
