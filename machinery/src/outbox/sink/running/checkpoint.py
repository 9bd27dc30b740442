"""Spark's checkpoint, read for the offsets of each batch. Through Hadoop's file system, because it may be remote.

offsets/<batch id>    planned: written before the batch is applied; the offsets where it ends
commits/<batch id>    committed: written after
sources/0/0           the offsets where batch 0 begins
metadata              the id of the query

It only says how a query has planned its batches. The sink's positions say what is applied. So nothing here is ever
repaired: a checkpoint that no query can continue is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from outbox.base.errors import Failure
from outbox.sink.remembering.positions import TopicOffsets, checkpoint_folder
from outbox.sink.running.stream import Offsets
from outbox.sink.spark.session import reason

BEGINNING = "sources/0/0"
LINES = {"offsets": 3, "commits": 2, "sources": 2, "metadata": 1}  # of a file, at least; the last one is a JSON object
UNAVAILABLE = "java.io.IOException"
# Such an exception too, and no later attempt would end otherwise.
UNUSABLE = {
    "java.nio.file.AccessDeniedException",
    "org.apache.hadoop.fs.FileAlreadyExistsException",
    "org.apache.hadoop.fs.ParentNotDirectoryException",
    "org.apache.hadoop.fs.UnsupportedFileSystemException",
    "org.apache.hadoop.security.AccessControlException",
}


class Checkpoint:
    """The checkpoint of one query. Only the query's driver, behind its fence, may use it.

    Each method raises Failure `checkpoint-unavailable` if the file system does not answer, which may pass.
    """

    def __init__(self, spark: SparkSession, uri: str) -> None:
        """Make its folder if it is missing. Raises Failure `checkpoint-unusable` if the URI is invalid or cannot be
        written to.
        """
        self.uri = uri
        self._folder = checkpoint_folder(uri)
        self._jvm: Any = spark._jvm
        self._gateway = spark.sparkContext._gateway
        try:
            with self._answering():
                self._files = self._path("").getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
                problem = "" if self._files.mkdirs(self._path("")) else "it cannot be made"
        except (Py4JError, PySparkException) as error:
            problem = reason(error)
        if problem:
            raise Failure(f"checkpoint {uri}: {problem}", "correct OUTBOX_SINK_STORAGE", code="checkpoint-unusable")

    def is_new(self) -> bool:
        """Whether no query has ever used it."""
        with self._answering():
            return not self._files.listStatus(self._path(""))

    def end(self, batch_id: int) -> Offsets:
        """The offsets where a planned batch ends."""
        return self._offsets(f"offsets/{batch_id}")

    def is_committed(self, batch_id: int) -> bool:
        """Whether Spark has recorded that a batch is done, so that it will not be repeated."""
        return self._exists(f"commits/{batch_id}")

    def is_pending(self) -> bool:
        """Whether a batch is planned and not committed: a query begins with it."""
        return self._newest("offsets") > self._newest("commits")

    def start(self) -> Offsets | None:
        """Where the next batch begins: where the newest committed one ends whose file is complete. None if no file says
        it.
        """
        committed = self._batches("commits")
        files = [f"offsets/{batch}" for batch in sorted(committed, reverse=True)] or [BEGINNING]
        return next((self._offsets(file) for file in files if self._is_complete(file)), None)

    def problem(self, start: Offsets | None, positions: TopicOffsets) -> str | None:
        """Why no query of a sink with these positions, of all its topics, can continue it from its `start`; None if one
        can.
        """
        if broken := [file for file in self._needed() if not self._is_complete(file)]:
            return f"truncated or missing: {', '.join(broken)}"
        if start is None:
            return None
        if start.keys() != positions.keys():
            return f"it is of other topics: {', '.join(sorted(start))}"
        ahead = [
            f"{topic}/{partition}"
            for topic, of_topic in sorted(start.items())
            for partition, offset in sorted(of_topic.items())
            if offset > positions[topic].get(partition, 0)
        ]
        return f"it is ahead of the positions, on {', '.join(ahead)}" if ahead else None

    def _needed(self) -> list[str]:
        """The files that a query needs to continue: those of the newest two batches, or of the beginning."""
        newest = max(self._newest("offsets"), self._newest("commits"))
        if newest < 0:
            return [file for file in ("metadata", BEGINNING) if self._exists(file)]
        before = [f"offsets/{newest - 1}", f"commits/{newest - 1}"] if newest else [BEGINNING]
        last = [f"commits/{newest}"] if self.is_committed(newest) else []
        return ["metadata", *before, f"offsets/{newest}", *last]

    def _is_complete(self, file: str) -> bool:
        """Whether a file is there, and whole: a crash of the host may truncate it anywhere."""
        if not self._exists(file):
            return False
        lines = self._read(file)
        if len(lines) < LINES[file.partition("/")[0]]:
            return False
        try:
            return isinstance(json.loads(lines[-1]), dict)
        except ValueError:
            return False

    def _offsets(self, file: str) -> Offsets:
        by_topic: Mapping[str, Mapping[str, int]] = json.loads(self._read(file)[-1])
        return {
            topic: {int(partition): offset for partition, offset in of_topic.items()}
            for topic, of_topic in by_topic.items()
        }

    def _exists(self, file: str) -> bool:
        with self._answering():
            return bool(self._files.exists(self._path(file)))

    def _newest(self, log: str) -> int:
        """The newest batch of a log; -1 without any."""
        return max(self._batches(log), default=-1)

    def _batches(self, log: str) -> list[int]:
        if not self._exists(log):
            return []
        with self._answering():
            names = [status.getPath().getName() for status in self._files.listStatus(self._path(log))]
        return [int(name) for name in names if name.isdigit()]

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Convert what the file system raises if it does not answer."""
        try:
            yield
        except Py4JJavaError as error:
            exception = error.java_exception
            if not is_instance_of(self._gateway, exception, UNAVAILABLE) or exception.getClass().getName() in UNUSABLE:
                raise
            raise Failure(
                f"checkpoint {self.uri}: {reason(error)}",
                "see whether its file system runs; or correct OUTBOX_SINK_STORAGE",
                code="checkpoint-unavailable",
            ) from error

    def _read(self, file: str) -> list[str]:
        """The lines of a file."""
        if self._folder is not None:  # ten calls through py4j take longer than all else that a small batch needs
            text = (self._folder / file).read_text("utf-8", errors="replace")  # as Java's decoder below
        else:
            with self._answering(), closing(self._files.open(self._path(file))) as stream:
                text = str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        return text.rstrip().split("\n")

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.uri}/{name}" if name else self.uri)
