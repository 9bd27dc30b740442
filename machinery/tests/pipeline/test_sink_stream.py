"""The sink as a process, on real Kafka, Spark and Postgres: what it applies, and what a stop or a kill does to it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, cast

import psutil
import pytest
import requests
from confluent_kafka import Producer
from packaging.requirements import Requirement
from psycopg2 import extensions

from outbox.audit import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink.decoding import dead_records
from outbox.sink.remembering import positions
from outbox.sink.remembering.positions import Beginning
from outbox.sink.repair import rewind
from outbox.sink.repair.rewind import TopicPartition
from outbox.sink.spark.reader import DRIVER_MAX_RECORDS
from outbox_lab.stack import ports
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.spark import UI_FILTER, UI_SECRET, ui_header
from outbox_lab.testing.command import environment, outbox
from outbox_lab.testing.helpers import chosen_seed
from tests.orders import cancelled, placed
from tests.stock import Client
from tests.support import faulty_sink
from tests.support.made_events import nth_key, sums, uuid7
from tests.support.outbox_rows import Writer, at_work
from tests.support.paths import ROOT
from tests.support.sink_driver import Database, sink_on
from tests.support.sink_process import (
    PLAIN,
    RANDOM,
    TIMEOUT_S,
    Publisher,
    catch_up,
    catch_up_faulty,
    catch_up_plain,
    checkpoint,
    logged,
    reported_failure,
    run_faulty,
    running,
    running_faulty,
    running_plain,
    running_warm,
    wait_applied,
)
from tests.support.topic_reader import drop_records, later, topic_of

Run = Callable[..., CompletedProcess[str]]
Start = Callable[..., AbstractContextManager[SinkProcess]]


def succeeded(done: CompletedProcess[str]) -> CompletedProcess[str]:
    """A run that has ended well."""
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("run", [catch_up, catch_up_plain])
def test_committed_records_alone_are_applied(
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

    again = succeeded(run(topic, "dedup", "naive"))
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
    done = succeeded(finish(topic, "dedup", "naive"))
    # Even the naive sink is right: a graceful stop repeats nothing.
    assert database.totals() == naive.totals() == sums(some)
    assert sum(int(str(line["duplicates"])) for line in logged(done, "applied")) == 0


def test_a_second_driver_is_refused(topic: Settings, publisher: Publisher, database: Database) -> None:
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
    succeeded(catch_up(topic))
    assert database.totals() == sums(some)


def test_a_jvm_that_dies_ends_the_sink(topic: Settings, publisher: Publisher, database: Database) -> None:
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
    succeeded(catch_up(topic))
    columns = 'topic, partition, "offset", event_id::text, reason, key, value, headers, recorded_at'
    kept = database.query(f"SELECT {columns} FROM dead_letters ORDER BY partition")
    for number, (row, (key, value, headers, reason)) in enumerate(zip(kept, bad, strict=True)):
        assert row[:5] == (topic_of(topic), number, 0, ids[number], reason)
        kept_key, kept_value, kept_headers, recorded_at = cast("Any", row[5:])
        assert (kept_key if kept_key is None else bytes(kept_key), bytes(kept_value)) == (key, value)
        assert dead_records.headers(kept_headers) == headers
        assert began_at < recorded_at < datetime.now(UTC) + timedelta(minutes=1)


def test_a_lost_or_truncated_checkpoint(topic: Settings, publisher: Publisher, database: Database) -> None:
    some = publisher.events(90)
    publisher.send(some[:30])
    succeeded(catch_up(topic, "dedup", "naive"))

    # The host lost power: the newest logs of one are empty, and the metadata of another is cut off.
    for log in ("offsets", "commits"):
        max((checkpoint(topic) / log).iterdir(), key=lambda file: int(file.name)).write_text("")
    (checkpoint(topic, "naive") / "metadata").write_text("{")
    publisher.send(some[30:60])
    cut = succeeded(catch_up(topic, "dedup", "naive"))
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
    lost = succeeded(catch_up(topic, "dedup", "naive"))
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
    succeeded(catch_up(topic))
    publisher.send(some[20:])
    with fresh_databases() as empty:
        succeeded(catch_up(topic.replace(sink_db_url=empty.sink_db_url)))
        assert Database(empty).totals() == sums(some), "the topic has everything"
    for partition, end in topics.last_stable_offsets(topic, topic_of(topic)).items():
        drop_records(topic, topic_of(topic), end, partition)
    with fresh_databases() as empty:
        done = catch_up(topic.replace(sink_db_url=empty.sink_db_url))
        assert [line["code"] for line in logged(done, "sink failed")] == ["events-lost"]
        assert "were never applied" in reported_failure(done)


def test_metrics_show_what_was_applied(topic: Settings, publisher: Publisher, database: Database) -> None:
    some = publisher.events(40)
    publisher.send(some)
    publisher.send(some[:10])
    publisher.send_raw(nth_key(0), b"{", None)
    publisher.send(publisher.events(30, keys=9), abort=True)
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


def test_a_rewind_reads_again(topic: Settings, publisher: Publisher, database: Database) -> None:
    some = publisher.events(60)
    publisher.send(some)
    succeeded(catch_up(topic, "dedup", "naive"))
    begin = rewind.to_earliest(topic, "dedup")
    assert sum(move.position - move.begin for move in begin.values()) >= 60
    for sink in ("dedup", "naive"):
        assert rewind.rewind(topic, sink, rewind.to_earliest(topic, sink)) == 1
    # The host lost power at the beginning of one replay.
    replay = checkpoint(topic, "dedup.1")
    replay.mkdir()
    (replay / "metadata").write_text("{")
    again = succeeded(catch_up(topic, "dedup", "naive"))
    assert [line["sink"] for line in logged(again, "another checkpoint begins")] == ["dedup"]
    assert sum(int(str(line["duplicates"])) for line in logged(again, "applied") if line["sink"] == "dedup") == 60
    assert database.totals() == sums(some)
    assert Database(topic, "naive").totals() == sums([*some, *some])
    assert logged(catch_up(topic, "dedup"), "applied") == [], "once, not at every start"
    # The next replay is without Spark, and once too, whichever comes then.
    assert rewind.rewind(topic, "dedup", rewind.to_earliest(topic, "dedup")) == 3
    assert rows(succeeded(catch_up_plain(topic, "dedup")), "dedup") == 60
    for run in (catch_up_plain, catch_up):
        assert logged(run(topic, "dedup"), "applied") == []


def rows(done: CompletedProcess[str], sink: str) -> int:
    """How many events a sink has read in a run."""
    return sum(int(str(line["rows"])) for line in logged(done, "applied") if line["sink"] == sink)


# Without Spark, in one process ---------------------------------------------------------------------------------------


def test_plain_sinks_and_handlers_need_no_package_of_sinks_on_spark(
    topic: Settings, publisher: Publisher, database: Database, tmp_path: Path
) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_spark = [Requirement(one).name for one in extras["sink"] if not one.startswith("outbox")]
    assert "pyspark" in of_spark
    absent = f"import sys\nsys.modules.update(dict.fromkeys({of_spark}))\n"  # they cannot be imported
    (tmp_path / "sitecustomize.py").write_text(absent)
    env = environment(topic.home, **topic.as_env(), PYTHONPATH=str(tmp_path))

    def run(*words: str) -> CompletedProcess[str]:
        command = [sys.executable, "-m", "outbox", *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)

    publisher.send(publisher.events(20))
    publisher.send_raw(nth_key(0), b"{", None)
    for words in (["sink", PLAIN, "dedup"], ["handle", "item_receipts"]):
        succeeded(run(*words, "--until-caught-up"))
    assert (database.applied(), len(database.dead_letters())) == (20, 1)
    assert database.query("SELECT count(*) FROM handled_events") == [(20,)]
    for command in (["sink", "dedup"], ["check"]):
        assert "install the extra" in reported_failure(run(*command))
    both = catch_up_plain(topic, "dedup", "lakehouse")
    assert [line["code"] for line in logged(both, "sink cannot run")] == ["engine-wrong"]
    assert "run it without --plain" in reported_failure(catch_up_plain(topic, "lakehouse"))


# Two topics ---------------------------------------------------------------------------------------------------------


def test_a_topic_is_added_and_removed(topic: Settings, publisher: Publisher) -> None:
    """A deployment lets the sink read more topics, or fewer. Spark continues no checkpoint then."""
    fault, sent, database = faulty_sink.without_orders.__name__, Counter[str](), Database(topic, "activity")

    def send() -> None:
        version = sent["order"] // 5 + 1
        keys = [nth_key(number) for number in range(5)]  # on both partitions of their topic
        orders = [placed(key, 1) if version == 1 else cancelled(key, version) for key in keys]
        publisher.send_records(topic_of(topic, "order"), orders)
        publisher.send(publisher.events(20))
        sent.update(item=20, order=5)

    def counted() -> dict[object, int]:
        rows = database.query("SELECT aggregate, sum(events) FROM activity WHERE sink = 'activity' GROUP BY aggregate")
        return {aggregate: int(str(count)) for aggregate, count in rows}

    def finish() -> None:
        done = catch_up(topic, "activity")
        assert done.returncode == 0, done.stderr
        assert counted() == sent
        counts = database.query("SELECT applied, duplicates, skipped FROM sinks WHERE name = 'activity'")
        assert counts == [(sent.total(), 0, 0)], "nothing came twice"

    send()
    with running_faulty(fault, topic, "activity") as sink:
        wait_applied(sink, database, 20)
    send()
    finish()
    assert checkpoint(topic, "activity.1").exists()
    send()
    finish()
    assert not checkpoint(topic, "activity.2").exists(), "once, not at every start"
    kinds = database.query("SELECT DISTINCT kinds FROM activity WHERE aggregate = 'order'")
    assert kinds == [(["order.cancelled", "order.placed"],)]

    read = sent["order"]
    send()
    assert "no longer asks for order.cancelled" in reported_failure(catch_up_faulty(fault, topic, "activity"))
    assert run_faulty(fault, topic, "rewind", "activity", "--to-positions", "--yes").returncode == 0
    with running_faulty(fault, topic, "activity") as sink:
        wait_applied(sink, database, sent["item"] + read)
    assert counted()["order"] == read
    send()
    finish()


def repair(settings: Settings, command: str, *words: str) -> CompletedProcess[str]:
    """`outbox rewind` or `outbox rebuild` of the sink `dedup`."""
    done = outbox(command, "dedup", *words, home=settings.home, **settings.as_env())
    assert "Traceback" not in done.stderr
    return done


def beginning(settings: Settings) -> Beginning:
    with closing(connect(settings, SinkRole.WRITER)) as connection, connection.cursor() as cursor:
        return positions.beginning(cursor, "dedup")


def applied_until(topic: Settings, offset: int) -> None:
    """Five records in partition 0, of which the sink `dedup`, whose driver has ended, has applied those before one."""
    name, producer = topic_of(topic), Producer(client_config(topic))
    for _ in range(5):
        producer.produce(name, b"{}", partition=0)
    producer.flush(30)
    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at({name: {0: offset, 1: 0}}, {name: topics.describe(topic, name).id})


class TestRewind:
    @pytest.fixture
    def applied(self, topic: Settings) -> Settings:
        """A topic with five records in partition 0, of which a sink, whose driver has ended, has applied four."""
        applied_until(topic, 4)
        return topic

    def test_a_moment_after_events_that_were_not_applied_skips_none(self, topic: Settings) -> None:
        place, producer, moments = TopicPartition(topic_of(topic), 0), Producer(client_config(topic)), [later()]
        for _ in range(3):
            producer.produce(place.topic, "{}", partition=0)
            producer.flush(30)
            moments.append(later())
        with closing(connect(topic, SinkRole.WRITER)) as connection:
            sink_on(connection).begin_at({place.topic: {0: 2}}, {place.topic: topics.describe(topic, place.topic).id})
        begun = [rewind.to_datetime(topic, "dedup", moment)[place].begin for moment in moments]
        assert begun == [0, 1, 2, 2], "not 3: it has applied two of them"

    def test_what_the_topic_has_dropped_is_given_up_only_if_told_so(self, applied: Settings) -> None:
        drop_records(applied, topic_of(applied), 5)
        assert "would replay nothing" in repair(applied, "rewind", "--yes", "--to-earliest").stderr
        assert Database(applied).positions() == {0: 4, 1: 0}
        told = repair(applied, "rewind", "--yes", "--to-earliest", "--skip-dropped").stdout
        assert "/0: from offset 5, giving up 4 to 4" in told
        assert "begins there at its next start" in told
        assert Database(applied).positions() == {0: 5, 1: 0}
        succeeded(catch_up(applied))

    def test_what_a_partition_has_dropped_since_it_was_added_is_given_up_too(self, topic: Settings) -> None:
        name, producer = topic_of(topic), Producer(client_config(topic))
        with closing(connect(topic, SinkRole.WRITER)) as connection:
            sink_on(connection).begin_at({name: {0: 0}}, {name: topics.describe(topic, name).id})
        for _ in range(3):
            producer.produce(name, b"{}", partition=1)
        producer.flush(30)
        drop_records(topic, name, 2, partition=1)
        lost = catch_up_plain(topic, "dedup")
        assert [line["code"] for line in logged(lost, "sink failed")] == ["events-lost"]
        told = repair(topic, "rewind", "--yes", "--to-earliest", "--skip-dropped").stdout
        assert "/1: from offset 2, giving up 0 to 1" in told
        succeeded(catch_up_plain(topic, "dedup"))
        assert Database(topic).positions()[1] == 3

    def test_the_command_asks_and_says_where_the_sink_begins(self, applied: Settings) -> None:
        name = topic_of(applied)
        assert "no topic was created again" in repair(applied, "rewind", "--accept-recreated", "--yes").stderr
        asked = repair(applied, "rewind", "--to-earliest")
        assert (asked.returncode, beginning(applied)) == (130, Beginning(0, {})), "nobody has confirmed it"
        assert f"partition {name}/0: from offset 0, replaying 4" in asked.stdout
        assert "with checkpoint 1" in repair(applied, "rewind", "--to-earliest", "--yes").stdout
        assert beginning(applied) == Beginning(1, {name: {0: 0, 1: 0}})
        assert repair(applied, "rewind", "--to-positions", "--yes").returncode == 0
        assert beginning(applied) == Beginning(2, {name: {0: 4, 1: 0}})
        assert Database(applied).positions() == {0: 4, 1: 0}, "what is applied stays applied"


class Movements(Writer):
    """A client of the service that moves stock. Each movement is a batch of the sink: a rebuild beside it needs most of
    the machine.
    """

    def __init__(self, settings: Settings, client: Client) -> None:
        super().__init__(settings, chosen_seed(), pause_s=0.5)
        self._client = client

    def write(self, _: extensions.connection) -> int:
        quantity = self.random.choice([-1, 1]) * (1 + self.random.randrange(100))
        assert self._client.move(nth_key(self.random.randrange(6)), quantity).status_code == 201
        return 1

    def wait_for_more(self, count: int = 8) -> None:
        """Wait until so many more movements are made than now."""
        goal = self.committed + count
        wait_for(f"{count} more movements", lambda: not self.is_alive() or self.committed >= goal, timeout_s=TIMEOUT_S)
        assert self.is_alive()


def spoil(settings: Settings) -> None:
    """Once the sink knows all items, damage what it holds, and see that it shows."""
    wait_for("the sink to apply", lambda: len(Database(settings).totals()) == 6, timeout_s=TIMEOUT_S)
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection, connection.cursor() as cursor:
        for statement in ("UPDATE stock SET stock = stock + 1000", "DELETE FROM processed_events"):
            cursor.execute(f"{statement} WHERE sink = 'dedup'")
            assert cursor.rowcount > 0
    assert check.check(settings).sink("dedup").drift


class TestRebuild:
    def test_beside_a_sink_and_a_service_that_go_on(self, chain: Settings, client: Client) -> None:
        def rebuild(source: str, *words: str) -> str:
            done = repair(chain, "rebuild", "--from", source, *(words or ("--yes",)))
            assert done.returncode == 0, done.stderr
            return done.stdout

        with running_warm(chain) as sink:
            with at_work(Movements(chain, client)) as movements:
                spoil(chain)
                assert "nothing was changed" in rebuild("topic", "--dry-run")
                assert check.check(chain).sink("dedup").drift
                assert check.check(chain).sink("dedup.rebuild").drift == {}
                movements.wait_for_more()
                assert sink.is_running(), sink.tail()
                assert "resuming an interrupted rebuild" in rebuild("topic")
                movements.wait_for_more()
                wait_for("another driver", lambda: "sink-superseded" in sink.tail(100), timeout_s=TIMEOUT_S)
                spoil(chain)
                assert "keys differ, by" in rebuild("source")
                assert check.check(chain).sink("dedup").drift == {}, "also while events are in flight"
                movements.wait_for_more()
            report = check.check_settled(chain, TIMEOUT_S, needs=sink.require_running)
            assert report.findings == []
            # It is idle now, and the next rebuild is noticed at its next event.
            rebuild("topic")
            assert client.move(nth_key(0), 1).status_code == 201
            report = check.check_settled(chain, TIMEOUT_S, needs=sink.require_running)
        assert report.findings == []
        assert [one.name for one in report.sinks] == ["dedup"]

    def test_a_topic_that_has_dropped_events_is_refused(self, topic: Settings) -> None:
        applied_until(topic, 1)
        drop_records(topic, topic_of(topic), 4)
        refused = repair(topic, "rebuild", "--from", "topic", "--yes")
        assert refused.returncode == 1
        assert "partition 0 begins at offset 4 — `outbox rebuild dedup --from source`" in refused.stderr
        assert "there is no copy" in repair(topic, "rebuild", "--from", "topic", "--drop-copy").stdout

        would = repair(topic, "rebuild", "--from", "source", "--dry-run")
        assert (would.returncode, Database(topic).positions()[0]) == (0, 1), would.stderr
        done = repair(topic, "rebuild", "--from", "source", "--yes")
        assert f"partition {topic_of(topic)}/0: offsets 1 to 3 are skipped" in done.stdout, done.stderr
        assert Database(topic).positions()[0] == 4
