"""Read parts of the topic in several processes: decoding is most of the work of a check."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection

from outbox.audit.topic_part import PartReader, Range, TopicPart
from outbox.base.errors import Failure
from outbox.base.settings import Settings

PROCESSES_MAX = 4  # each takes some 250 MB


def read_parts(reader: PartReader, settings: Settings, parts: Sequence[Range]) -> Iterator[TopicPart]:
    """The parts in their order. One that does not fit into memory comes in pieces.

    A single part is read by this process. Otherwise there is a process for each core, up to four, and none of them
    outlives this one by more than the part at which it is. Raises Failure if Kafka is unavailable or a process dies.
    """
    count = min(len(parts), os.cpu_count() or 1, PROCESSES_MAX)
    if count <= 1:
        for one in parts:
            yield from _pieces(reader, settings, one)
        return
    with ExitStack() as processes:
        # Each process has every count-th part. It waits with the next one until the last one was received.
        connections = [
            processes.enter_context(_process(reader, settings, parts[number::count])) for number in range(count)
        ]
        for number in range(len(parts)):
            yield from _received(connections[number % count])


def _pieces(reader: PartReader, settings: Settings, within: Range) -> Iterator[TopicPart]:
    rest: Range | None = within
    while rest is not None:
        part = reader.read(settings, rest)
        yield part
        rest = part.rest


@contextmanager
def _process(reader: PartReader, settings: Settings, parts: Sequence[Range]) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")  # a fork would share the clients of Kafka
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, reader, settings, parts), daemon=True)
    with ours:
        with theirs:
            process.start()
        try:
            yield ours
        finally:
            process.kill()
            process.join()


def _send(connection: Connection, reader: PartReader, settings: Settings, parts: Sequence[Range]) -> None:
    """What such a process does. Its reader may be gone at any time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    gc.freeze()  # what is imported stays: looking at it again and again would be a third of the work
    with suppress(BrokenPipeError):
        try:
            for within in parts:
                for part in _pieces(reader, settings, within):
                    connection.send(part)
        except Failure as failure:
            connection.send(failure)


def _received(connection: Connection) -> Iterator[TopicPart]:
    is_whole = False
    while not is_whole:
        try:
            part = connection.recv()
        except (EOFError, OSError):
            raise Failure(
                "a process of the check was killed",
                f"run it again; with its up to {PROCESSES_MAX} processes it takes 1.5 GB",
                code="process-ended",
            ) from None
        if isinstance(part, Failure):
            raise part
        yield part
        is_whole = part.rest is None
