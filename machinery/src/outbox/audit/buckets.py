"""Rows by event id, of which only a bounded number is in memory.

The rows are spread over buckets by a hash of their id: all rows of an event are in one bucket, which holds about 1/128
of all events. What does not fit into memory is in temporary files, one per bucket, in the order in which it was added.
This is the first half of a hash join as databases do it (Kitsuregawa, Tanaka and Moto-oka, "Application of hash to data
base machine and its architecture", 1983). `outbox.audit.comparison` is the second.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from io import BytesIO
from typing import IO, Generic, TypeVar

import msgspec

from outbox.base.errors import Failure

R = TypeVar("R")

COUNT = 128
PACKED_ROWS = 10_000  # at a time: a row takes some 300 bytes before, and 70 after
MEMORY_MAX_BYTES = 32 * 2**20
LENGTH_BYTES = 4
SALT_BYTES = 16


class Packed(Generic[R]):
    """Rows in memory, packed by bucket."""

    def __init__(self, row: type[R], salt: bytes) -> None:
        """``row`` is a type that msgspec encodes. Numbers beyond 64 bits need the type Decimal.

        What has the same ``salt`` spreads ids alike. Nobody who does not know it can choose ids that all fall into one
        bucket.
        """
        self._salt = salt
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[tuple[bytes, row]]).decode  # type: ignore[valid-type]
        self._empty()

    def _empty(self) -> None:
        self.bytes = 0
        self._chunks: list[list[bytes]] = [[] for _ in range(COUNT)]
        self._added: list[list[tuple[bytes, R]]] = [[] for _ in range(COUNT)]
        self._added_rows = 0

    def add(self, event_id: bytes, row: R) -> None:
        """Add a row."""
        bucket = blake2b(event_id, digest_size=1, key=self._salt).digest()[0] % COUNT
        self._added[bucket].append((event_id, row))
        self._added_rows += 1
        if self._added_rows >= PACKED_ROWS:
            self._pack()

    def add_all(self, packed: Sequence[bytes]) -> None:
        """Add what `take` of another one with the same salt has returned."""
        self._pack()
        for chunks, chunk in zip(self._chunks, packed, strict=True):
            if chunk:
                chunks.append(chunk)
                self.bytes += len(chunk)

    def take(self) -> list[bytes]:
        """Remove all rows, and return them packed, by bucket."""
        self._pack()
        taken = [b"".join(chunks) for chunks in self._chunks]
        self._empty()
        return taken

    def rows(self, bucket: int) -> Iterator[tuple[bytes, R]]:
        """The rows of a bucket, as they were added."""
        for chunk in self._chunks[bucket]:
            yield from self.unpacked(BytesIO(chunk))
        yield from self._added[bucket]

    def unpacked(self, packed: IO[bytes]) -> Iterator[tuple[bytes, R]]:
        """Rows that `take` has returned, of one bucket."""
        while length := packed.read(LENGTH_BYTES):
            yield from self._decode(packed.read(int.from_bytes(length)))

    def _pack(self) -> None:
        if not self._added_rows:
            return
        added, self._added, self._added_rows = self._added, [[] for _ in range(COUNT)], 0
        self.add_all([self._chunk(rows) if rows else b"" for rows in added])

    def _chunk(self, rows: list[tuple[bytes, R]]) -> bytes:
        encoded = self._encode(rows)
        return len(encoded).to_bytes(LENGTH_BYTES) + encoded


class Buckets(Generic[R]):
    """Rows, of which those beyond some in memory are in files. Rows may be added after others were read."""

    def __init__(self, row: type[R], salt: bytes) -> None:
        """See `Packed`."""
        self._in_memory = Packed(row, salt)
        self._files: list[IO[bytes]] = []
        self._closing = ExitStack()

    def add(self, event_id: bytes, row: R) -> None:
        """Add a row."""
        self._in_memory.add(event_id, row)
        self._spill()

    def add_all(self, packed: Sequence[bytes]) -> None:
        """Add what `Packed.take` with the same salt has returned."""
        self._in_memory.add_all(packed)
        self._spill()

    def rows(self, bucket: int) -> Iterator[tuple[bytes, R]]:
        """The rows of a bucket, as they were added."""
        if self._files:
            self._files[bucket].seek(0)
            yield from self._in_memory.unpacked(self._files[bucket])
        yield from self._in_memory.rows(bucket)

    def close(self) -> None:
        """Delete the files."""
        self._closing.close()

    def _spill(self) -> None:
        if self._in_memory.bytes <= MEMORY_MAX_BYTES:
            return
        try:
            if not self._files:
                for _ in range(COUNT):
                    made = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the others
                    self._files.append(self._closing.enter_context(made))
            for file, packed in zip(self._files, self._in_memory.take(), strict=True):
                file.seek(0, os.SEEK_END)
                file.write(packed)
        except OSError as error:
            raise Failure(
                f"temporary files in {tempfile.gettempdir()}: {error.strerror}",
                "point TMPDIR at a folder with some 70 bytes free for each event of topic and outbox",
                code="no-room",
            ) from error
