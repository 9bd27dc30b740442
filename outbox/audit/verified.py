"""What a check has verified, so that the next one reads only what came since.

A check that finds no problem notes a *verified point*: for each partition the offset up to which every sink had applied
the topic, and for each key the versions up to there. An incremental check reads the topic from that point on, and of
the outbox only the rows that may have been written since. Totals it compares for every key, as always.

That proves as much as a full check if what came is as usual. Whatever is not is a `Doubt`, and everything is read:

- a sink is new, or its positions are before the point; the topic has dropped records that were not read
- the source has a lower version of a key than before, or no longer has it
- a record on the topic repeats a version of before, or is no event of the outbox
- anything is found that is wrong

A rewind of a sink is no doubt: its positions stay. If the replay changes a total, the comparison of totals finds that.

What it does not see is what happens to old data afterwards, such as an old row of the outbox that somebody changes. A
full check does. Its one assumption is that no transaction that writes events takes longer than `LATE_MS`. Sinks that no
job declares take no part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from outbox.audit import buckets
from outbox.audit.buckets import Buckets
from outbox.audit.sinks import SinkState
from outbox.audit.source import LATE_MS, Written
from outbox.audit.topic_log import TopicLog, Versions, add_version
from outbox.base.settings import Settings
from outbox.sink.records import RecordDecoder


class Doubt(Exception):
    """An incremental check does not suffice. The message says why."""


class Verified(msgspec.Struct, frozen=True):
    """A verified point. Without arguments it is the beginning, where nothing is verified."""

    of: str = ""  # what was compared; a point of something else is none
    topic_id: str = ""
    next_offsets: dict[int, int] = {}
    records: int = 0
    duplicates: int = 0
    pruned: int = 0
    versions: dict[str, tuple[int, int, int]] = {}  # by key the lowest, the highest, and how many
    since_ms: int = 0  # a row of the outbox from before this moment is verified

    @property
    def is_beginning(self) -> bool:
        """Whether nothing is verified."""
        return not self.next_offsets

    def counted_versions(self) -> dict[str, Versions]:
        """The versions by key, to count on."""
        return {key: Versions(*one) for key, one in self.versions.items()}

    def has(self, key: str, version: int | None) -> bool:
        """Whether the event with this version of the key is verified."""
        return version is not None and key in self.versions and version <= self.versions[key][1]

    def require_usual(self, states: Iterable[SinkState], versions: Mapping[str, int] | None) -> None:
        """Raise Doubt if a sink or the source is not at or after this point."""
        for state in _declared(states):
            for partition, offset in self.next_offsets.items():
                if state.positions.get(partition, 0) < offset:
                    raise Doubt(f"sink {state.name} is before offset {offset} of partition {partition}")
        for key, (_, highest, _) in self.versions.items():
            if (versions or {}).get(key, 0) < highest:
                raise Doubt(f"the source has a lower version of key {key} than {highest}")


def advance(
    verified: Verified,
    log: TopicLog,
    outbox: Buckets[Written],
    states: Iterable[SinkState],
    *,
    pruned: int,
    read_at_ms: int,
) -> Verified:
    """The point up to which all sinks have applied the topic, after a comparison that has found nothing wrong.

    ``pruned`` is the number of events on the topic that the outbox no longer has, as the report counts them;
    ``read_at_ms`` is when the source was read.
    """
    declared = _declared(states)
    next_offsets = {
        partition: min([offset, *(state.positions.get(partition, 0) for state in declared)])
        for partition, offset in log.next_offsets.items()
    }
    versions = verified.counted_versions()
    records, duplicates, open_ms = verified.records, verified.duplicates, read_at_ms
    for bucket in range(buckets.COUNT):
        known: set[bytes] = set()
        for event_id, event in log.delivered.rows(bucket):
            if event.offset >= next_offsets[event.partition]:
                continue
            records += 1
            duplicates += event_id in known
            if event_id not in known and event.version is not None:
                known.add(event_id)
                add_version(versions, event)
        for event_id, row in outbox.rows(bucket):
            if event_id not in known and not verified.has(row.key, row.version):
                open_ms = min(open_ms, row.occurred_ms)
    return Verified(
        of=verified.of,
        topic_id=log.topic_id or "",
        next_offsets=next_offsets,
        records=records,
        duplicates=duplicates,
        pruned=pruned,
        versions={key: (one.lowest, one.highest, one.count) for key, one in versions.items()},
        since_ms=open_ms - LATE_MS,
    )


def identity(settings: Settings, decoder: RecordDecoder) -> str:
    """What is compared: a point is of use for the same only."""
    source = f"{settings.source_db_host}:{settings.source_db_port}/{settings.source_db_name}"
    return f"{settings.kafka_bootstrap}/{settings.topic} {source} {decoder.key} {decoder.version} {decoder.quantity}"


def load(settings: Settings, decoder: RecordDecoder) -> Verified:
    """The point that was stored last; the beginning if there is none of the same."""
    of = identity(settings, decoder)
    try:
        found = msgspec.msgpack.decode(_file(settings).read_bytes(), type=Verified)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Verified(of)
    return found if found.of == of else Verified(of)


def store(settings: Settings, verified: Verified) -> None:
    """Store a point in place of the one before. A process that dies here leaves one of the two."""
    file = _file(settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_bytes(msgspec.msgpack.encode(verified))
    new.rename(file)


def _declared(states: Iterable[SinkState]) -> list[SinkState]:
    return [state for state in states if state.is_declared]


def _file(settings: Settings) -> Path:
    name = re.sub(r"[^\w.-]", "_", settings.topic)
    return settings.home / "check" / f"{name}.verified"
