"""The command line that the two JVM parts share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outbox.jvm import archive
from outbox.jvm.jars import class_path, jars
from outbox.jvm.java import java
from outbox_lab.stack import config
from outbox_lab.stack.process import Process


class Jvm(Process):
    """A controlled JVM on the jars of the `kafka` configuration."""

    poll_s = 0.3  # a question is work for a JVM that starts, and delays it
    heap = "384m"
    heap_at_start = "64m"
    main_class: str

    def arguments(self) -> Sequence[str | Path]:
        """The arguments of the main class."""
        raise NotImplementedError

    def argv(self) -> Sequence[str | Path]:
        return [*self.java(), self.main_class, *self.arguments()]

    def java(self) -> Sequence[str | Path]:
        """A bounded JVM. The serial collector needs the least memory and no core of its own."""
        options = [
            f"-Xmx{self.heap}",
            f"-Xms{self.heap_at_start}",
            "-XX:+UseSerialGC",
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true",
        ]
        return [
            java(),
            *options,
            *archive.options(self.name, jars("kafka")),
            f"-Dlog4j2.configurationFile={config.file(config.LOGGING).as_uri()}",
            "-cp",
            class_path("kafka"),
        ]
