"""Rows by event id, of which only a bounded number is in memory.

The rows are spread over buckets by a hash of their id: all rows of an event are in one bucket, which holds about 1/64
of all events. What does not fit into memory is in temporary files, one per bucket, in the order in which it was added.
This is the first half of a hash join as databases do it (Kitsuregawa, Tanaka and Moto-oka, "Application of hash to data
base machine and its architecture", 1983). `outbox.audit.comparison` is the second.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, Generic, TypeVar

import msgspec

from outbox.base.errors import Failure

Row = TypeVar("Row")

COUNT = 64
BUFFER_MAX_ROWS = 200_000  # some 60 MB; an event takes about 300 bytes in memory, and about 70 in a file
LENGTH_BYTES = 4


class Buckets(Generic[Row]):
    """Rows, each with an event id. Rows may be added after others were read."""

    def __init__(self, row: type[Row]) -> None:
        """``row`` is a type that msgspec encodes. Numbers beyond 64 bits need the type Decimal."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[tuple[bytes, row]]).decode  # type: ignore[valid-type]
        self._buffered = 0
        self._buffers: list[list[tuple[bytes, Row]]] = [[] for _ in range(COUNT)]
        self._files: list[IO[bytes]] = []
        self._closing = ExitStack()

    def add(self, event_id: bytes, row: Row) -> None:
        """Add a row."""
        # A hash that differs between processes: nobody can choose ids that all fall into one bucket.
        self._buffers[hash(event_id) % COUNT].append((event_id, row))
        self._buffered += 1
        if self._buffered >= BUFFER_MAX_ROWS:
            self._spill()

    def rows(self, bucket: int) -> Iterator[tuple[bytes, Row]]:
        """The rows of a bucket, as they were added."""
        if self._files:
            file = self._files[bucket]
            file.seek(0)
            while length := file.read(LENGTH_BYTES):
                yield from self._decode(file.read(int.from_bytes(length)))
        yield from self._buffers[bucket]

    def firsts(self, bucket: int) -> dict[bytes, Row]:
        """By id, the first row of each event of a bucket."""
        found: dict[bytes, Row] = {}
        for event_id, row in self.rows(bucket):
            found.setdefault(event_id, row)
        return found

    def close(self) -> None:
        """Delete the files."""
        self._closing.close()

    def _spill(self) -> None:
        try:
            if not self._files:
                for _ in range(COUNT):
                    made = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the others
                    self._files.append(self._closing.enter_context(made))
            for file, buffer in zip(self._files, self._buffers, strict=True):
                rows = self._encode(buffer)
                file.seek(0, os.SEEK_END)
                file.write(len(rows).to_bytes(LENGTH_BYTES) + rows)
                buffer.clear()
        except OSError as error:
            raise Failure(
                f"temporary files in {tempfile.gettempdir()}: {error.strerror}",
                "point TMPDIR at a folder with some 70 bytes free for each event of topic and outbox",
                code="no-room",
            ) from error
        self._buffered = 0
