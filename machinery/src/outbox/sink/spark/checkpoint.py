"""Spark's checkpoint, read for the offsets of each batch. Through Hadoop's file system, because it may be remote.

offsets/<batch id>    planned: written before the batch is applied; the offsets where it ends
commits/<batch id>    committed: written after
sources/0/0           the offsets where batch 0 begins; nobody reads it once that is committed
metadata              the id of the query
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from py4j.java_gateway import is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from outbox.base.errors import Failure
from outbox.sink.spark import local_checkpoint
from outbox.sink.spark.session import reason

Offsets = dict[str, dict[int, int]]  # by topic and partition
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

    def __init__(self, spark: SparkSession, uri: str, sink: str) -> None:
        """Make its folder if it is missing. Raises Failure `checkpoint-unusable` if the URI is invalid or cannot be
        written to.
        """
        self.uri = uri
        self._sink = sink
        self._folder = local_checkpoint.folder(uri)
        self._jvm: Any = spark._jvm
        self._gateway = spark.sparkContext._gateway
        try:
            with self._answering():
                self._files = self._path("").getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
                is_there = self._files.mkdirs(self._path(""))
        except (Py4JError, PySparkException) as error:
            raise self._unusable(reason(error)) from error
        if not is_there:
            raise self._unusable("it cannot be made")

    def exists(self) -> bool:
        """Whether a batch was ever planned. Until then a query begins at the offsets that it is given."""
        return bool(self._batches("offsets"))

    def end(self, batch_id: int) -> Offsets:
        """The offsets where a planned batch ends."""
        return _offsets(self._read(f"offsets/{batch_id}").splitlines()[2])

    def start(self, batch_id: int) -> Offsets:
        """The offsets where a planned batch begins."""
        if batch_id > 0:
            return self.end(batch_id - 1)
        text = self._read("sources/0/0")
        return _offsets(text[text.index("{") :])

    def is_committed(self, batch_id: int) -> bool:
        """Whether Spark has recorded that a batch is done, so that it will not be repeated."""
        return self._exists(f"commits/{batch_id}")

    def is_pending(self) -> bool:
        """Whether a batch is planned and not committed: a query begins with it."""
        return self._newest("offsets") > self._newest("commits")

    def topics(self) -> set[str]:
        """The topics of the newest batch that was planned; none without any."""
        planned = self._newest("offsets")
        return set(self.end(planned)) if planned >= 0 else set()

    def applied(self) -> Offsets | None:
        """The offsets up to which batches are committed; None without any."""
        batches = self._batches("commits")
        return self.end(max(batches)) if batches else None

    def repair(self) -> list[str]:
        """Delete the files that a crash of the host has truncated, as far as the sink can do without; return them.

        These are the newest log files; before the first commit, also the files that every query begins with. It does no
        harm to forget that a batch was planned or committed: its events are repeated, and the sink knows them.

        Raises Failure if another file that the query needs is truncated or missing.
        """
        deleted = self._delete([file for log in ("offsets", "commits") for file in self._truncated(log)])
        planned = self._newest("offsets")
        deleted += self._delete([f"commits/{batch}" for batch in self._batches("commits") if batch > planned])
        if planned <= 0 and self._newest("commits") < 0:
            deleted += self._delete(self._broken_beginning())
        self._require_complete()
        return deleted

    def _truncated(self, log: str) -> Iterator[str]:
        """The newest files of a log down to the first complete one."""
        for batch in sorted(self._batches(log), reverse=True):
            if self._is_complete(f"{log}/{batch}"):
                return
            yield f"{log}/{batch}"

    def _broken_beginning(self) -> Iterator[str]:
        """What is not complete of the files that a query begins with. A batch without its beginning goes with it."""
        if not self._is_complete("metadata"):
            yield "metadata"
        if not self._is_complete("sources/0/0"):
            yield from ("sources/0/0", "offsets/0")

    def _require_complete(self) -> None:
        planned, committed = self._newest("offsets"), self._newest("commits")
        read = {f"offsets/{batch}" for batch in (committed, planned - 1, planned) if batch >= 0}
        broken = sorted(file for file in read if not self._is_complete(file))
        if self._exists("metadata") and not self._is_complete("metadata"):
            broken.append("metadata")
        if broken:
            raise Failure(
                f"checkpoint {self.uri}: truncated or missing: {', '.join(broken)}",
                f"`outbox rewind {self._sink} --to-positions`: the sink then begins another checkpoint, at the "
                "positions in its database",
                code="checkpoint-broken",
            )

    def _delete(self, files: Iterable[str]) -> list[str]:
        """Delete these files and return those that existed."""
        existing = [file for file in files if self._exists(file)]
        with self._answering():
            for file in existing:
                self._files.delete(self._path(file), False)
        return existing

    def _is_complete(self, file: str) -> bool:
        return self._exists(file) and local_checkpoint.is_complete(file, self._read(file))

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
            if not self._is_unavailable(error.java_exception):
                raise
            raise Failure(
                f"checkpoint {self.uri}: {reason(error)}",
                "see whether its file system runs; or correct OUTBOX_SINK_CHECKPOINTS",
                code="checkpoint-unavailable",
            ) from error

    def _is_unavailable(self, exception: Any) -> bool:
        return is_instance_of(self._gateway, exception, UNAVAILABLE) and exception.getClass().getName() not in UNUSABLE

    def _unusable(self, reason: str) -> Failure:
        return Failure(
            f"checkpoint {self.uri}: {reason}", "correct OUTBOX_SINK_CHECKPOINTS", code="checkpoint-unusable"
        )

    def _read(self, name: str) -> str:
        if self._folder is not None:  # ten calls through py4j take longer than all else that a small batch needs
            return (self._folder / name).read_text("utf-8", errors="replace")  # as Java's decoder below
        with self._answering():
            stream = self._files.open(self._path(name))
            try:
                return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
            finally:
                stream.close()

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self.uri}/{name}" if name else self.uri)


def _offsets(text: str) -> Offsets:
    return {
        topic: {int(partition): offset for partition, offset in of_topic.items()}
        for topic, of_topic in json.loads(text).items()
    }
