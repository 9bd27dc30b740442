"""The files in which tasks stage rows for a MERGE: ``<table>.staging/<epoch>/<attempt>.parquet``.

Each attempt of a task has a file of its own, complete when the attempt succeeds. The MERGE reads the files of attempts
that Spark reported as successful, by their names; it never lists the folder. So a file of another attempt (failed,
speculative, of a driver that lost its fence) is never read, whenever it appears. The driver removes the folder of its
epoch after each batch, and those of earlier epochs at its start and its end.

A task has no JVM at hand, so it writes with Arrow's file systems. The driver uses Hadoop's, as it does for the table.
In S3 tasks get its endpoint and its keys from the driver, if it has keys; otherwise they look for credentials
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from outbox.sink.spark import local_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Of a row group: Spark reads one at once, up to 4,096 rows, into the memory of a task.
GROUP_MAX_BYTES = 4 << 20
S3 = re.compile("s3a://(.+)")


@dataclass(frozen=True)
class Folder:
    """The folder of an epoch, for tasks; executors receive it by pickling."""

    uri: str
    s3: Mapping[str, Any] = field(default_factory=dict, repr=False)  # arguments of Arrow's client

    def file(self, attempt: int) -> str:
        """The URI of an attempt's file."""
        return f"{self.uri}/{attempt}.parquet"

    @contextmanager
    def writing(self, attempt: int, schema: pa.Schema) -> Iterator[Callable[[pa.Table], None]]:
        """A function that writes rows of this schema under an attempt; the file is complete at the end of the block.

        It holds few rows at once. Raises OSError if they cannot be written.
        """
        files, path = self._place(self.file(attempt))
        with files.open_output_stream(path) as stream, pq.ParquetWriter(stream, schema) as writer:

            def write(rows: pa.Table) -> None:
                groups = -(-rows.nbytes // GROUP_MAX_BYTES)
                if groups:
                    writer.write_table(rows, row_group_size=-(-rows.num_rows // groups))

            yield write

    def _place(self, uri: str) -> tuple[fs.FileSystem, str]:
        """A file system of Arrow, and the path of a file in it."""
        if found := S3.fullmatch(uri):
            return fs.S3FileSystem(**self.s3), found[1]
        return fs.LocalFileSystem(), str(local_checkpoint.folder(uri))


class StagedFiles:
    """The staged files of a running sink, beside its table."""

    def __init__(self, spark: SparkSession, table: str, epoch: int) -> None:
        """``table`` is the URI of the table."""
        self._uri, self._epoch = f"{table}.staging", epoch
        self._jvm: Any = spark._jvm
        self._conf = spark._jsparkSession.sessionState().newHadoopConf()

    def folder(self) -> Folder:
        """The folder for the attempts of this epoch; it is made if it is missing."""
        found = Folder(f"{self._uri}/{self._epoch}", self._s3() if S3.fullmatch(self._uri) else {})
        self._files.mkdirs(self._path(found.uri))
        return found

    def uris(self, attempts: Sequence[int]) -> list[str]:
        """The files of these attempts."""
        folder = Folder(f"{self._uri}/{self._epoch}")
        return [folder.file(attempt) for attempt in attempts]

    def clear(self) -> None:
        """Remove the files of this epoch."""
        self._files.delete(self._path(f"{self._uri}/{self._epoch}"), True)

    def drop(self) -> None:
        """Remove the files of this epoch and of earlier ones; a later driver keeps its own."""
        if not self._files.exists(self._path(self._uri)):
            return
        names = [status.getPath().getName() for status in self._files.listStatus(self._path(self._uri))]
        others = [name for name in names if not name.isdigit() or int(name) > self._epoch]
        for name in {*names} - {*others}:
            self._files.delete(self._path(f"{self._uri}/{name}"), True)
        if not others:
            self._files.delete(self._path(self._uri), False)

    def _s3(self) -> dict[str, Any]:
        """Where S3 is and who we are there, as Hadoop is configured, for Arrow's client."""
        secrets = {
            "access_key": self._secret("access.key"),
            "secret_key": self._secret("secret.key"),
            "session_token": self._secret("session.token"),
        }
        scheme, _, host = self._conf.getTrimmed("fs.s3a.endpoint", "").rpartition("://")
        is_encrypted = self._conf.getBoolean("fs.s3a.connection.ssl.enabled", True)
        place = {
            "region": self._conf.getTrimmed("fs.s3a.endpoint.region", ""),
            "endpoint_override": host,
            "scheme": scheme or ("https" if is_encrypted else "http"),
        }
        return {name: value for name, value in {**secrets, **place}.items() if value}

    def _secret(self, name: str) -> str:
        """A key, in plain text or from Hadoop's store of credentials."""
        found = self._conf.getPassword(f"fs.s3a.{name}")
        return "" if found is None else str(self._jvm.java.lang.String(found))

    @property
    def _files(self) -> Any:
        return self._path(self._uri).getFileSystem(self._conf)

    def _path(self, uri: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(uri)


def is_reachable(table: str) -> bool:
    """Whether tasks can write beside a table at this URI."""
    return local_checkpoint.folder(table) is not None or S3.fullmatch(table) is not None
