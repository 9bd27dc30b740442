"""One Cassandra node, as a controlled process: for tests of a sink that writes there. No stack starts one by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outbox.jvm.jars import class_path
from outbox.jvm.java import java
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process

# Paths are relative to the node's folder: the JVM may not be able to read its path, which may have any character.
CONFIG = """\
cluster_name: outbox
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
listen_address: {address}
rpc_address: {address}
storage_port: {storage_port}
native_transport_port: {port}
seed_provider: [{{class_name: org.apache.cassandra.locator.SimpleSeedProvider, parameters: [{{seeds: "{seed}"}}]}}]
num_tokens: 1
auto_bootstrap: false
commitlog_sync: periodic
commitlog_sync_period: 10s
memtable_heap_space: 64MiB
memtable_offheap_space: 64MiB
"""
LOGGING = """\
<configuration>
  <appender name="out" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%date %-5level %logger{0}: %msg%n</pattern></encoder>
  </appender>
  <root level="WARN"><appender-ref ref="out"/></root>
</configuration>
"""
# A node that is alone waits for no other one.
PROPERTIES = {
    "cassandra-foreground": "yes",
    "cassandra.config": "file:cassandra.yaml",
    "cassandra.storagedir": "data",
    "cassandra.native.epoll.enabled": "false",
    "cassandra.ring_delay_ms": "0",
    "cassandra.skip_wait_for_gossip_to_settle": "0",
    "java.security.manager": "allow",  # Java 21 refuses a security manager by default
    "logback.configurationFile": "file:logback.xml",
}
# What Cassandra reads of Java's own classes, as its file jvm17-server.options has it.
EXPORTED = ("java.base/jdk.internal.misc", "java.base/jdk.internal.ref", "java.base/sun.nio.ch", "java.sql/java.sql")
OPENED = (
    *("java.base/java.io", "java.base/java.lang", "java.base/java.nio", "java.base/java.util", "java.base/sun.nio.ch"),
    *("java.base/java.util.concurrent", "java.base/java.util.concurrent.atomic"),
    *("java.base/jdk.internal.ref", "java.base/jdk.internal.reflect", "java.base/jdk.internal.module"),
)


class Cassandra(Process):
    """A node on loopback, without a login; data in its folder. Its ports are chosen once and kept across restarts."""

    poll_s = 0.3

    def __init__(self, home: Path) -> None:
        super().__init__("cassandra", home)
        self.port, self._storage_port = ports.choose(0, 0)

    def prepare(self) -> None:
        """Write its configuration."""
        ports.require_free(self.port, "Cassandra")
        seed = f"{ports.LOOPBACK}:{self._storage_port}"
        written = {"address": ports.LOOPBACK, "port": self.port, "storage_port": self._storage_port, "seed": seed}
        (self.folder / "cassandra.yaml").write_text(CONFIG.format_map(written))
        (self.folder / "logback.xml").write_text(LOGGING)

    def argv(self) -> Sequence[str | Path]:
        """A JVM with a bounded heap, like the other servers'."""
        return [
            java(),
            *("-Xmx512m", "-Xms64m", "-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true"),
            *(f"-D{name}={value}" for name, value in PROPERTIES.items()),
            *(f"--add-exports={name}=ALL-UNNAMED" for name in EXPORTED),
            *(f"--add-opens={name}=ALL-UNNAMED" for name in OPENED),
            *("-cp", class_path("cassandra"), "org.apache.cassandra.service.CassandraDaemon"),
        ]

    def is_ready(self) -> bool:
        """Whether it takes clients: the last thing that it begins."""
        return ports.is_open(self.port)
