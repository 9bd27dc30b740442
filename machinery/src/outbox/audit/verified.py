"""The point up to which a check has verified everything: the next one reads only what came since.

A check that finds no problem notes a *verified point*: for each topic and partition the offset up to which every sink
had applied it, and for each key the versions up to there. An incremental check reads the topics from that point on, and
of the outbox only the rows that may have been written since, and counts these alone. Totals and rows it compares for
every key, as always.

That proves as much as a full check if what came is as usual. Whatever is not is a `Doubt`, and everything is read:

- a sink is new, or its positions are before the point; a topic has dropped records that were not read
- a dead letter of a record before the point came, went, or was discarded
- the source has a lower version of a key than before, or no longer has it
- a record on a topic repeats a version of before, or is no event of the outbox
- anything is found that is wrong

A rewind or a rebuild of a sink is no doubt, however far its replay is, because all that it changes is read whole each
time. If an event is applied again, or no longer, the totals differ. If it is set aside, there is another dead letter.

A topic whose events have no version, or whose versions the source does not say, has no point: it is read whole.

What it does not see is what happens to old data afterwards, such as an old row of the outbox that somebody changes. A
full check does. Its one assumption is that no transaction that writes events takes longer than `LATE_MS`. Sinks that no
job declares take no part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec

from outbox.audit.declared import Declared
from outbox.audit.sinks import Sinks, SinkState
from outbox.audit.store import TopicEnd
from outbox.base.settings import Settings
from outbox.events.values import KEY_MAX_BYTES

IDENTITY_BYTES = 32
FORMAT = 4  # of a stored point


class Doubt(Exception):
    """An incremental check does not suffice. The message says why."""


class VerifiedKey(NamedTuple):
    """The versions of a key that are verified, with all in between, and the partition of its events."""

    lowest: int
    highest: int
    partition: int


class TopicPoint(msgspec.Struct, frozen=True):
    """The verified part of a topic. Without arguments nothing is verified."""

    topic_id: str = ""
    next_offsets: dict[int, int] = {}
    keys: dict[str, VerifiedKey] = {}
    since_ms: int = 0  # a row of the outbox from before this moment is verified
    letters: dict[str, bytes] = {}  # by sink, those of records before the point (`SinkState.digest_of_letters`)

    @property
    def is_beginning(self) -> bool:
        """Whether nothing is verified."""
        return not self.next_offsets

    def require_usual(
        self, topic: str, states: Iterable[SinkState], versions: Mapping[str, int] | None, sinks: Sinks
    ) -> None:
        """Raise Doubt if a sink that reads the topic, or the source, is not at or after this point."""
        for state in states:
            positions = state.positions.get(topic, {})
            for partition, offset in self.next_offsets.items():
                if positions.get(partition, 0) < offset:
                    raise Doubt(f"sink {state.name} is before offset {offset} of {topic}, partition {partition}")
            if state.digest_of_letters(topic, self.next_offsets) != self.letters.get(state.name):
                raise Doubt(f"sink {state.name}: its dead letters of {topic} from before have changed")
        for key, known in self.keys.items():
            if (versions or {}).get(key, 0) < known.highest and not sinks.is_erased([topic], key):
                raise Doubt(f"topic {topic}: the source has a lower version of key {key} than {known.highest}")


class Verified(msgspec.Struct, frozen=True):
    """A verified point over all topics. Without arguments it is the beginning, where nothing is verified."""

    of: str = ""  # what was compared; a point of something else is ignored
    topics: dict[str, TopicPoint] = {}

    @property
    def is_beginning(self) -> bool:
        """Whether nothing is verified."""
        return all(point.is_beginning for point in self.topics.values())

    def topic(self, name: str) -> TopicPoint:
        """The point of a topic."""
        return self.topics.get(name, TopicPoint())

    @property
    def ends(self) -> dict[str, TopicEnd]:
        """Where reading goes on, by topic."""
        return {name: TopicEnd(point.topic_id or None, dict(point.next_offsets)) for name, point in self.topics.items()}

    @property
    def since_ms(self) -> dict[str, int]:
        """By topic, the moment from which on rows of the outbox have to be read."""
        return {name: point.since_ms for name, point in self.topics.items()}


def identity(settings: Settings, declared: Declared) -> str:
    """A digest of what is compared: a point is of use for the same only."""
    compared = [
        *(FORMAT, KEY_MAX_BYTES, settings.sink_id_age_max_days, settings.kafka_bootstrap),
        *(settings.source_db_url.server, settings.source_db_url.name),
        *(settings.sink_db_url.server, settings.sink_db_url.name),
        [
            [topic.name, topic.decoder.key, topic.decoder.version, sorted(topic.kinds), topic.properties, topic.sources]
            for topic in declared.topics
        ],
        # The contract: under a stricter one, records that were verified as events are rejected.
        [
            [kind.schema.name, kind.schema.document, kind.upcaster and [kind.upcaster.source, *kind.upcaster.names]]
            for kind in declared.kinds
        ],
        {
            name: {topic: sorted(one.types) for topic, one in spec.decoders.items()}
            for name, spec in declared.sinks.items()
        },
        {
            name: [[one.name, one.source, one.sink, repr(one.adds), list(one.columns)] for one in of_sink]
            for name, of_sink in declared.comparisons.items()
        },
    ]
    return blake2b(msgspec.json.encode(compared, order="deterministic"), digest_size=IDENTITY_BYTES).hexdigest()


def load(settings: Settings, declared: Declared) -> Verified:
    """The point that was stored last; the beginning if its settings or contract differ, or if none is stored."""
    of = identity(settings, declared)
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


def _file(settings: Settings) -> Path:
    name = re.sub(r"[^\w.-]", "_", settings.topic_prefix)
    return settings.home / "check" / f"{name}.verified"
