"""Read parts of the topics in several processes: decoding is most of the work of a check."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection

from outbox.audit.topic_part import PartReader, TopicPart
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka.records import Within

PART_OFFSETS = 250_000  # some seconds of work
PROCESSES_MAX = 4  # some 300 MB each

Part = tuple[int, Within]  # the number of a topic, and offsets of it


def read_parts(reader: PartReader, settings: Settings, within: Mapping[int, Within]) -> Iterator[TopicPart]:
    """The records within these offsets of the topics with these numbers, in parts; those of a partition are in their
    order.

    Small topics are read by this process. For large ones `multiprocessing` starts a process for each core, up to four.
    When this process dies, they end after the part that they are reading. Raises Failure if Kafka is unavailable, or if
    one of them dies.
    """
    parts = list(_parts(within))
    count = min(len(parts), os.cpu_count() or 1, PROCESSES_MAX)
    if count <= 1 or _size(within) <= PART_OFFSETS:
        for one in parts:
            yield from _pieces(reader, settings, one)
        return
    with ExitStack() as processes:
        # Each process has every count-th part, and sends one only when the one before it was received.
        connections = [
            processes.enter_context(_process(reader, settings, parts[number::count])) for number in range(count)
        ]
        for number in range(len(parts)):
            yield from _received(connections[number % count])


def _parts(within: Mapping[int, Within]) -> Iterator[Part]:
    for topic, of_topic in within.items():
        size = _size({topic: of_topic})
        if size <= PART_OFFSETS:
            if size:
                yield topic, of_topic
            continue
        for partition, (first, last) in of_topic.items():
            for begin in range(first, last, PART_OFFSETS):
                yield topic, {partition: (begin, min(begin + PART_OFFSETS, last))}


def _size(within: Mapping[int, Within]) -> int:
    return sum(last - first for of_topic in within.values() for first, last in of_topic.values())


def _pieces(reader: PartReader, settings: Settings, one: Part) -> Iterator[TopicPart]:
    topic, within = one
    rest: Within | None = within
    while rest is not None:
        part = reader.read(settings, topic, rest)
        yield part
        rest = part.rest


@contextmanager
def _process(reader: PartReader, settings: Settings, parts: Sequence[Part]) -> Iterator[Connection]:
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


def _send(connection: Connection, reader: PartReader, settings: Settings, parts: Sequence[Part]) -> None:
    """Read parts, and send them to the process that started this one. That one may be gone at any time."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    gc.freeze()  # as in outbox.commands.check
    with suppress(BrokenPipeError):
        try:
            for one in parts:
                for part in _pieces(reader, settings, one):
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
                f"was memory short? {PROCESSES_MAX} of them take some 1.5 GB together; then run the check again",
                code="process-ended",
            ) from None
        if isinstance(part, Failure):
            raise part
        yield part
        is_whole = part.rest is None
