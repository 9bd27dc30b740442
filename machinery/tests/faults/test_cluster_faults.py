"""The sink on a Spark cluster whose parts are killed: a worker, the master, the driver; and with its files in an object
store whose link is cut. Nothing is lost or comes twice.

What is killed is in the middle of a task: it is frozen first, and its connection to Kafka is still there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import requests
from deltalake import DeltaTable
from pyarrow import fs

from outbox.audit import check
from outbox.base import envfile
from outbox.base.settings import DOTENV, Settings
from outbox.base.wait import wait_for
from outbox.jvm.jars import jars, pyspark_folder
from outbox.jvm.java import java_home
from outbox.sink.applying.lakehouse import table
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process
from outbox_lab.stack.spark import ui_header
from outbox_lab.stack.stack import Stack
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.homes import Homes
from tests.lake import NAME, ids
from tests.support.made_events import sums
from tests.support.paths import ROOT
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    Publisher,
    catch_up_alone,
    logged,
    reported_failure,
    running,
    sink_arguments,
    wait_applied,
    wait_caught_up,
)

pytestmark = pytest.mark.cluster

WORKERS = ("spark-worker-1", "spark-worker-2")
TIMEOUT_S = 300  # twelve JVMs on two cores
MANY = 60_000  # events: a batch of two tasks, each of which reads for long enough to be found reading
SECRET = "spark.authenticate.secret"
ESTABLISHED = psutil.CONN_ESTABLISHED


@pytest.fixture(scope="module")
def cluster(homes: Homes) -> Iterator[Stack]:
    """A master and two workers for the tests of this module to break."""
    stack = private_stack(homes.new("cluster"))
    stack.up(only=["spark-master", *WORKERS], workers=len(WORKERS))
    yield stack
    stack.down(gently=False)


@pytest.fixture
def clustered(topic: Settings, cluster: Stack) -> Settings:
    """A topic, and the cluster to run sinks on."""
    found = cluster.settings
    own = {"spark_master": found.spark_master, "spark_properties": found.spark_properties}
    return topic.replace(**own)


def reading(worker: Process, brokers: Collection[int]) -> psutil.Process | None:
    """The process of this worker that runs a task, if one does: it has a connection to Kafka. Others have none."""
    main = worker.pid()
    with suppress(psutil.Error):
        for process in psutil.Process(main).children(recursive=True) if main is not None else ():
            with suppress(psutil.Error):
                if process.name().startswith("python"):
                    found = process.net_connections("tcp")
                    if any(one.raddr and one.raddr.port in brokers and one.status == ESTABLISHED for one in found):
                        return process
    return None


@contextmanager
def frozen_in_a_task(workers: Sequence[Process], settings: Settings, events: Callable[[], None]) -> Iterator[Process]:
    """One of the workers stands still in the middle of a task until the end of the block. ``events`` brings it there.

    Which one runs a task is Spark's choice.
    """
    brokers = {int(broker.rpartition(":")[2]) for broker in settings.kafka_bootstrap.split(",")}

    def freeze() -> Process | None:
        for worker in workers:
            process = reading(worker, brokers)
            if process is not None:
                process.suspend()  # at once: it reads for less than a second
                if reading(worker, brokers) is not None:
                    return worker
                process.resume()  # its task had come to its end
        return None

    events()
    worker = wait_for("a task on a worker", freeze, timeout_s=TIMEOUT_S, poll_s=0.001)
    worker.pause()
    try:
        assert reading(worker, brokers) is not None
        yield worker
    finally:
        worker.resume()


def test_a_killed_worker_and_a_killed_master_lose_nothing(
    clustered: Settings, cluster: Stack, publisher: Publisher, database: Database
) -> None:
    workers, master = [cluster.part(name) for name in WORKERS], cluster.part("spark-master")
    some = publisher.events(4 * MANY)
    with running(clustered) as sink:

        def publish(begin: int) -> None:
            publisher.send(some[begin : begin + MANY])

        publish(0)
        wait_applied(sink, database, MANY, TIMEOUT_S)
        processes = [each for part in (sink, *workers) for each in part.processes()]
        assert_secret_is_private(clustered, processes)

        with frozen_in_a_task(workers, clustered, lambda: publish(MANY)) as killed:
            assert database.applied() == MANY
            killed.kill()
        wait_applied(sink, database, 2 * MANY, TIMEOUT_S)

        master.kill()
        publish(2 * MANY)
        wait_applied(sink, database, 3 * MANY, TIMEOUT_S)

        # The master that starts again finds the sink, and gives it executors in place of those it had.
        cluster.up(only=[master.name, killed.name])
        [other] = [worker for worker in workers if worker is not killed]
        other.kill()
        publish(3 * MANY)
        wait_applied(sink, database, 4 * MANY, TIMEOUT_S)

        assert database.totals() == sums(some)
        sink.stop()


def test_a_killed_driver_whose_executor_goes_on_later_loses_nothing(
    clustered: Settings, cluster: Stack, publisher: Publisher, database: Database
) -> None:
    cluster.up(only=WORKERS)
    workers = [cluster.part(name) for name in WORKERS]
    some = publisher.events(2 * MANY)
    publisher.send(some[:MANY])
    with running(clustered) as sink:
        wait_applied(sink, database, MANY, TIMEOUT_S)
        with frozen_in_a_task(workers, clustered, lambda: publisher.send(some[MANY:])) as worker:
            sink.kill()
            assert '"applied"' in Submitted(clustered).run(), "by the other worker"
            assert database.totals() == sums(some)
        wait_for("its executor to end", lambda: not has_executor(worker), timeout_s=TIMEOUT_S)
    assert database.totals() == sums(some)


# A MERGE -----------------------------------------------------------------------------------------------------------

MERGED = 20_000  # events of a batch: its MERGE takes long enough to be found running
MERGE = "MERGE operation"  # within the description of each of its jobs
LOST = "ExecutorLostFailure"


class Caught(NamedTuple):
    """A task of a MERGE, and the executor that runs it."""

    stage: str  # and its attempt: 4/0
    number: int
    executor: psutil.Process
    worker: Process


class Driver:
    """A sink's driver, as its REST interface shows it (https://spark.apache.org/docs/4.1.1/monitoring.html#rest-api)."""

    def __init__(self, clustered: Settings) -> None:
        assert clustered.spark_properties is not None
        [port] = ports.choose(0)
        properties = f"{clustered.spark_properties.read_text()}spark.ui.enabled true\nspark.ui.port {port}\n"
        file = clustered.home / "with-ui.properties"
        envfile.write_private(file, properties)
        self.settings = clustered.replace(spark_properties=file)
        self._url = f"http://{ports.LOOPBACK}:{port}/api/v1/applications"
        self._header = ui_header(properties)

    def catch(self, workers: Sequence[Process]) -> Caught:
        """Wait for a task of a MERGE, and freeze its executor while the task runs."""

        def caught() -> Caught | None:
            with suppress(requests.RequestException, ValueError):  # it may not answer yet
                merging = [stage for stage in self._ask("?status=active") if MERGE in stage.get("description", "")]
                for place in [f"{stage['stageId']}/{stage['attemptId']}" for stage in merging]:
                    running = (one for one in self._tasks(place) if one["status"] == "RUNNING")
                    for task in running:
                        found = Caught(place, task["taskId"], *executor_of(workers, task["executorId"]))
                        found.executor.suspend()
                        if not self.end(found):
                            return found
                        found.executor.resume()
            return None

        return wait_for("a task of a MERGE", caught, timeout_s=TIMEOUT_S, poll_s=0.01)

    def end(self, task: Caught) -> str:
        """How a task has ended: its status and its error. Empty while it runs."""
        for one in self._tasks(task.stage):
            if one["taskId"] == task.number and one["status"] != "RUNNING":
                return f"{one['status']} {one.get('errorMessage', '')}"
        return ""

    def _tasks(self, stage: str) -> Any:
        return self._ask(f"/{stage}/taskList?length=1000")

    def _ask(self, path: str) -> Any:
        """What it says about the stages of its application."""
        [application] = requests.get(self._url, headers=self._header, timeout=5).json()
        url = f"{self._url}/{application['id']}/stages{path}"
        return requests.get(url, headers=self._header, timeout=5).json()


def executor_of(workers: Sequence[Process], number: str) -> tuple[psutil.Process, Process]:
    """An executor, and its worker."""
    for worker in workers:
        for process in worker.processes():
            with suppress(psutil.Error):
                words = process.cmdline()
                if "--executor-id" in words and words[words.index("--executor-id") + 1] == number:
                    return process, worker
    raise ValueError(f"no executor {number}")


@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_killed_in_a_merge_each_event_is_in_the_table_once(
    victim: str, clustered: Settings, cluster: Stack, publisher: Publisher
) -> None:
    cluster.up(only=WORKERS)
    workers = [cluster.part(name) for name in WORKERS]
    driver, names = Driver(clustered), ["lakehouse"]
    some = publisher.events(2 * MERGED)
    publisher.send(some[:MERGED])
    with running(driver.settings, *names) as sink:
        wait_caught_up(sink, clustered, names)
        pid, before = sink.pid(), ids(clustered)
        publisher.send(some[MERGED:])
        task = driver.catch(workers)
        if victim == "worker":
            task.worker.kill()
            wait_for("the task to be lost", lambda: LOST in driver.end(task), timeout_s=TIMEOUT_S)
            wait_caught_up(sink, clustered, names)
            assert sink.pid() == pid, "the driver goes on"
        else:
            sink.kill()
            task.executor.resume()  # it ends: it has no driver any more
            assert ids(clustered) == before, "the MERGE was not committed"
    if victim == "driver":
        done = catch_up_alone(clustered, *names)
        assert done.returncode == 0, done.stderr
    assert ids(clustered) == sorted(event.event_id for event in some)


def assert_secret_is_private(settings: Settings, processes: Sequence[psutil.Process]) -> None:
    """The cluster's secret is in a file of mode 600, and in no command line."""
    assert settings.spark_properties is not None
    assert settings.spark_properties.stat().st_mode & 0o777 == 0o600
    secret = dict(line.split() for line in settings.spark_properties.read_text().splitlines())[SECRET]
    lines = []
    for process in processes:
        with suppress(psutil.Error):  # Spark's helpers come and go
            lines.append(" ".join(process.cmdline()))
    assert any("CoarseGrainedExecutorBackend" in line for line in lines)
    assert not any(secret in line for line in lines)


def has_executor(worker: Process) -> bool:
    """Whether it runs one."""
    for process in worker.processes():
        with suppress(psutil.Error):
            if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
                return True
    return False


class Submitted(Process):
    """The sink run by spark-submit, until it has caught up."""

    def __init__(self, settings: Settings) -> None:
        super().__init__("submitted", settings.home)
        self._settings = settings

    def argv(self) -> Sequence[str | Path]:
        return [
            pyspark_folder() / "bin" / "spark-submit",
            *("--master", str(self._settings.spark_master)),
            *("--properties-file", str(self._settings.spark_properties)),
            *("--jars", ",".join(map(str, jars("spark")))),
            *("--conf", f"spark.pyspark.python={sys.executable}"),
            ROOT / "src" / "outbox" / "submit" / "sink.py",
            *sink_arguments()[1:],
            "--until-caught-up",
        ]

    def env(self) -> Mapping[str, str]:
        tools = {"JAVA_HOME": java_home(), "SPARK_HOME": str(pyspark_folder())}
        return {**self._settings.as_env(), DOTENV: os.devnull, "PYTHONPATH": str(ROOT), **tools}

    def run(self) -> str:
        """Run it to its end, and return what it has said."""
        self.log_file.unlink(missing_ok=True)
        self.spawn()
        try:
            wait_for("the submitted sink to end", lambda: not self.processes(), timeout_s=TIMEOUT_S)
        except TimeoutError:
            print(self.tail(40))  # noqa: T201
            raise
        finally:
            self.kill()
        return self.log_file.read_text()


def test_a_master_that_cannot_be_one_is_reported_in_one_line(topic: Settings) -> None:
    nowhere = topic.replace(spark_master="nowhere:7077")
    assert "Spark on nowhere:7077 does not start" in reported_failure(catch_up_alone(nowhere))


# Checkpoints in S3, and the table of `lakehouse` too: moto's server, which keeps objects in memory, behind a link -----

BUCKET = "lake"
REGION, S3_KEY, S3_SECRET = "eu-central-1", "a-key", "a-secret"


class ObjectStore(Process):
    """The server."""

    start_timeout_s = 60.0

    def __init__(self, home: Path, port: int) -> None:
        super().__init__("s3", home)
        self._port = port

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "moto.server", "-H", ports.LOOPBACK, "-p", str(self._port)]

    def is_ready(self) -> bool:
        return ports.is_open(self._port)

    @property
    def files(self) -> fs.S3FileSystem:
        """The content of the store, for Arrow."""
        place = f"{ports.LOOPBACK}:{self._port}"
        options = {"access_key": S3_KEY, "secret_key": S3_SECRET, "region": REGION, "endpoint_override": place}
        return fs.S3FileSystem(**options, scheme="http", allow_bucket_creation=True)


@pytest.fixture(scope="module")
def link(homes: Homes) -> Iterator[Proxy]:
    """The link to a server with one bucket, which is empty at first."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed")
    with ports.reserved(0) as (port,):
        server = ObjectStore(homes.new("s3"), port)
        server.start()
    server.files.create_dir(BUCKET)
    made = Proxy("spark-s3", port)
    yield made
    made.close()
    server.stop()


@pytest.fixture
def stored(topic: Settings, link: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A topic whose sinks keep all that they have in S3. Spark goes by the link, and gives up soon if it is silent.

    Programs other than Spark go without the link, which is of this process: a reader that waits for the store may let
    no other thread of its process run.
    """
    variables = {
        "AWS_ENDPOINT_URL": f"http://{ports.LOOPBACK}:{link.target_port}",
        "AWS_ACCESS_KEY_ID": S3_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    properties = {
        "endpoint": f"http://{ports.LOOPBACK}:{link.port}",
        "endpoint.region": REGION,
        "path.style.access": "true",
        "access.key": S3_KEY,
        "secret.key": S3_SECRET,
        "attempts.maximum": "1",
        "retry.limit": "1",
    }
    file = tmp_path / "spark.properties"
    file.write_text("".join(f"spark.hadoop.fs.s3a.{name} {value}\n" for name, value in properties.items()))
    return topic.replace(sink_storage=f"s3a://{BUCKET}/{topic.topic_prefix}", spark_properties=file)


def test_a_killed_sink_continues_from_its_checkpoint_in_s3(stored: Settings, publisher: Publisher) -> None:
    some, database = publisher.events(420), Database(stored, NAME)
    publisher.send(some[:200])
    with running(stored, NAME) as sink:
        wait_applied(sink, database, 200, TIMEOUT_S)
        publisher.send(some[200:400])
        wait_applied(sink, database, 201, TIMEOUT_S)
        sink.kill()
    publisher.send(some[400:])
    again = catch_up_alone(stored, NAME)
    assert again.returncode == 0, again.stderr
    [started] = logged(again, "started")
    assert started["checkpoint"] == f"{stored.checkpoints}/{NAME}"
    assert int(str(logged(again, "applied")[0]["batch"])) > 0, "a query without its checkpoint begins with batch 0"
    found = DeltaTable(table.location(stored, NAME)).to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist()
    assert sorted(found) == sorted(event.event_id for event in some)
    [state] = [one for one in check.check(stored).sinks if one.name == NAME]
    assert state.not_compared == ""


def test_a_silent_file_system_is_reported_and_waited_for(
    stored: Settings, link: Proxy, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(40)
    publisher.send(some[:20])
    with running(stored, "dedup") as sink:
        wait_applied(sink, database, 20, TIMEOUT_S)
        link.cut()
        publisher.send(some[20:])
        wait_for("two attempts", lambda: sink.tail(50).count("the sink starts again") > 1, timeout_s=TIMEOUT_S)
        assert "checkpoint-unavailable" in sink.tail(50)
        link.heal()
        wait_applied(sink, database, 40, TIMEOUT_S)
        assert database.totals() == sums(some)
