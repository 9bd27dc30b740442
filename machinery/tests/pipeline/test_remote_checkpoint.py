"""Checkpoints in a file system that is not of this host: HDFS."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.jvm import ivy
from outbox.jvm.jars import spark_jars
from outbox.jvm.java import java
from outbox.sink.repair import rewind
from outbox_lab.stack import config, ports
from outbox_lab.stack.process import Process
from outbox_lab.testing.homes import Homes, all_homes
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

CLIENT = "hadoop-client-api-"
IVY = """\
<ivy-module version="2.0">
  <info organisation="outbox" module="hdfs"/>
  <configurations><conf name="hdfs"/></configurations>
  <dependencies>
    <dependency org="org.apache.hadoop" name="hadoop-client-minicluster" rev="{version}" conf="hdfs->default"
      transitive="false"/>
  </dependencies>
</ivy-module>
"""


class Hdfs(Process):
    """One of its two servers."""

    main_class: str

    def __init__(self, name: str, home: Path, uri: str) -> None:
        super().__init__(name, home)
        self.uri = uri

    def properties(self) -> Mapping[str, str]:
        raise NotImplementedError

    def argv(self) -> Sequence[str | Path]:
        return self.command()

    def command(self, *words: str) -> Sequence[str | Path]:
        properties = {"fs.defaultFS": self.uri, "dfs.replication": "1", **self.properties()}
        options = [word for name, value in properties.items() for word in ("-D", f"{name}={value}")]
        own = [*ivy.resolve(_ivy_file(), "hdfs").glob("lib/*.jar"), *spark_jars()]
        log_config = config.OURS / config.SPARK_LOGGING
        jvm = ["-Xmx128m", f"-Dlog4j2.configurationFile={log_config.as_uri()}", "-cp", os.pathsep.join(map(str, own))]
        return [java(), *jvm, self.main_class, *options, *words]


class NameNode(Hdfs):
    main_class = "org.apache.hadoop.hdfs.server.namenode.NameNode"

    def properties(self) -> Mapping[str, str]:
        return {
            "dfs.namenode.name.dir": (self.folder / "names").as_uri(),
            "dfs.namenode.rpc-bind-host": ports.LOOPBACK,
            "dfs.namenode.http-address": f"{ports.LOOPBACK}:0",
            # Started again it serves at once, and does not wait for the DataNode's blocks.
            "dfs.namenode.safemode.threshold-pct": "0",
            "dfs.namenode.safemode.extension": "0",
        }

    def prepare(self) -> None:
        if not (self.folder / "names").exists():
            done = self._run(self.command("-format", "-nonInteractive"))
            assert done.returncode == 0, done.stderr

    def is_ready(self) -> bool:
        return ports.is_open(int(self.uri.rpartition(":")[2]))


class DataNode(Hdfs):
    main_class = "org.apache.hadoop.hdfs.server.datanode.DataNode"

    def __init__(self, name: str, home: Path, uri: str, blocks: Path) -> None:
        """``blocks`` is an empty folder. A DataNode fails if its path has a space."""
        super().__init__(name, home, uri)
        self._blocks = blocks

    def properties(self) -> Mapping[str, str]:
        listeners = ("dfs.datanode.address", "dfs.datanode.http.address", "dfs.datanode.ipc.address")
        return {
            "dfs.datanode.data.dir": self._blocks.as_uri(),
            **dict.fromkeys(listeners, f"{ports.LOOPBACK}:0"),
        }

    def is_ready(self) -> bool:
        """Whether the NameNode has given it a pool of blocks."""
        return any((self._blocks / "current").glob("BP-*/current/VERSION"))


@pytest.fixture(scope="module")
def name_node(homes: Homes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NameNode]:
    """The NameNode of an HDFS that is empty at first."""
    home = homes.new("hdfs")
    with ports.reserved(0) as (port,):
        uri = f"hdfs://{ports.LOOPBACK}:{port}"
        servers = NameNode("namenode", home, uri), DataNode("datanode", home, uri, tmp_path_factory.mktemp("blocks"))
        for server in servers:
            server.start()
    yield servers[0]
    for server in reversed(servers):
        server.stop()


def _ivy_file() -> Path:
    """The file for the version of Spark's client. Ivy's answers are kept by what is in it."""
    [client] = [jar for jar in spark_jars() if jar.name.startswith(CLIENT)]
    file = all_homes() / "hdfs.xml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(IVY.format(version=client.stem.removeprefix(CLIENT)))
    return file


@pytest.fixture
def remote(topic: Settings, name_node: NameNode) -> Settings:
    """A topic whose sinks keep their checkpoints in HDFS."""
    return topic.replace(sink_storage=f"{name_node.uri}/the sinks/{topic.topic_prefix}")


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
    assert started["checkpoint"] == f"{remote.checkpoints}/dedup"
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
    assert failure.startswith(f"outbox: checkpoint {remote.checkpoints}/dedup: ")
    assert "OUTBOX_SINK_STORAGE" in failure
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
