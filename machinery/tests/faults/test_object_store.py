"""Sinks with their checkpoints in S3, and `lakehouse` with its table there too: moto's server, which keeps objects in
memory, behind a link that can be cut.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyarrow import fs

from outbox.audit import check
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.sink.applying.lakehouse import table
from outbox_lab.soak.proxy import Proxy
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process
from outbox_lab.testing.homes import Homes
from tests.support.made_events import sums
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up_alone, logged, running, wait_applied

pytestmark = pytest.mark.cluster

BUCKET = "lake"
REGION, KEY, SECRET = "eu-central-1", "a-key", "a-secret"
NAME = "lakehouse"
TIMEOUT_S = 300


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
        options = {"access_key": KEY, "secret_key": SECRET, "region": REGION, "endpoint_override": place}
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
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": REGION,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    properties = {
        "endpoint": f"http://{ports.LOOPBACK}:{link.port}",
        "endpoint.region": REGION,
        "path.style.access": "true",
        "access.key": KEY,
        "secret.key": SECRET,
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
