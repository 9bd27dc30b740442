"""Read how far every sink has come, its totals, and what it has set aside, in one snapshot of the sink database.

A dead letter that was discarded is acknowledged: somebody has looked at it and given a reason. Its event is no longer
due.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from hashlib import blake2b, sha256
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from psycopg2 import extensions

from outbox.audit.declared import EXACT, Declared, EventTopic, text_of
from outbox.audit.rows import SINK, ComparedRows, load_rows, read_sinks
from outbox.audit.source import snapshot
from outbox.base.database import query
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.sink.comparison_files import Comparison, folder_of
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.records import Records
from outbox.sink.remembering import dead_letters
from outbox.sink.rows import Row, stream, unusable
from outbox.sink.spec import SinkSpec, TargetState

if TYPE_CHECKING:
    from outbox.audit.store import Store

NO_COMPARISON = "no file in {} says what to compare"
UNDECLARED = "no job declares it; to remove it, delete its rows (docs/runbook.md)"
NO_REASON = "no reason given"
UNREADABLE = "its target cannot be read"
DECODED_AT_ONCE = 1000
DIGEST_BYTES = 16
KEY_MAX_BYTES = 1000  # shown and compared: a stranger's key may have megabytes
LETTERS = f"""
SELECT sink, identity, status <> 'discarded', topic, partition, "offset", is_event,
       CASE WHEN is_event THEN key ELSE substring(key FOR {KEY_MAX_BYTES}) END,
       CASE WHEN is_event THEN headers END, CASE WHEN is_event THEN value END,
       round(extract(epoch FROM recorded_at) * 1000)::bigint
  FROM public.dead_letters
 WHERE status = 'open'
    OR event_id IS NOT NULL
       AND (status = 'discarded'
            OR status = 'replayed' AND resolution IS DISTINCT FROM '{dead_letters.FILTERED}' AND sink = ANY(%s))
"""  # noqa: S608
REASONS = """
SELECT sink, coalesce(resolution, %s), count(*)
  FROM public.dead_letters WHERE status = 'discarded' GROUP BY 1, 2 ORDER BY 1, 3 DESC, 2
"""
ACKNOWLEDGED = """
SELECT identity FROM public.dead_letters WHERE sink = ANY(%s) GROUP BY 1 HAVING bool_and(status <> 'open')
"""


class TopicOffset(NamedTuple):
    """The place of a record."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"partition {self.partition}, offset {self.offset}"


class Letter(NamedTuple):
    """A dead letter that is open, or that is discarded and has an event id."""

    topic: str
    key: str = ""
    is_open: bool = True
    place: TopicOffset | None = None
    """The place of an invalid record: a valid record may have the same event id. None if it stands for the event."""
    is_event: bool = True
    """Whether the event was valid: strategy or projection have refused it."""
    kind: int | None = None
    version: int | None = None
    numbers: tuple[Decimal | None, ...] = ()
    origin: TopicOffset = TopicOffset(0, 0)
    """The place of the record that it was written for, valid or not."""

    def is_of(self, topic: str, place: TopicOffset | None) -> bool:
        """Whether it sets aside the event that is first at this place of a topic, or that is not on the topic."""
        return self.topic == topic and (self.place is None or place is None or self.place == place)


@dataclass(frozen=True)
class SinkState:
    """One sink in one snapshot."""

    name: str
    positions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # by topic and partition, the next offset
    # By topic and key, the version up to which its result is the source's.
    bases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # by topic and key, the highest applied
    letters: Mapping[str, Letter] = field(default_factory=dict)  # by identity: the event id, or a hash
    discarded: Mapping[str, int] = field(default_factory=dict)  # by reason, how many dead letters
    duplicates: int = 0  # skipped, ever
    filtered: int = 0  # left out by its transform, ever
    carries: Literal["events", "states"] = "events"
    takes_states: bool = False  # an applied event supersedes the earlier events of its key
    may_be_ahead: bool = False  # it may have events behind its positions, up to the version of each key
    not_compared: str = ""  # why none of its totals is compared, if so
    failure: str = ""  # why its target cannot be read, if so
    is_declared: bool = True  # otherwise nothing is expected of it

    def digest_of_letters(self, topic: str, before: Mapping[int, int]) -> bytes:
        """A digest of its dead letters for records of a topic below these offsets.

        The digest changes if one of them comes, goes, is discarded, or turns out to hold a valid event.
        """
        found = blake2b(digest_size=DIGEST_BYTES)
        for identity, letter in sorted(self.letters.items()):
            if letter.topic == topic and letter.origin.offset < before.get(letter.origin.partition, 0):
                found.update(identity.encode() + bytes([letter.is_open, letter.is_event]))
        return found.digest()


@dataclass(frozen=True)
class Sinks:
    """All sinks in one snapshot."""

    states: Sequence[SinkState] = ()
    acknowledged: frozenset[str] = frozenset()
    """Identities of the records that an operator has discarded."""
    erased: frozenset[tuple[str, str]] = frozenset()
    """The keys that were erased when the source was read: topic, and sha256 of the key."""

    def is_erased(self, topics: Iterable[str], key: str) -> bool:
        """Whether a key was erased on one of these topics."""
        return bool(self.erased) and any((topic, sha256(key.encode()).hexdigest()) in self.erased for topic in topics)


def read(settings: Settings, declared: Declared, store: Store) -> Sinks:
    """Every sink of this project that ever ran, by name. Sinks of other topics than their job's are left out. What is
    compared is in the store.

    A target that cannot be read is a failure of its sink alone. Raises Failure if a database cannot be read, or if a
    comparison cannot be used.
    """
    targets, failures = _targets(settings, declared)  # before their dead letters
    queries = _queries(declared, targets)
    with snapshot(settings, SinkRole.AUDITOR) as connection, connection.cursor() as cursor:
        in_database = ((one, read_sinks(connection, one)) for one in queries)
        elsewhere = ((one, totals_of(name, targets[name])) for name in targets for one in declared.comparisons_of(name))
        load_rows(store, SINK, chain[tuple[Comparison, Iterable[Row]]](in_database, elsewhere))
        says = [name for name, one in targets.items() if one.lacking is not None]
        set_aside = _letters(connection, declared, [one for one in says if declared.sinks[one].target.is_elsewhere])
        cursor.execute(REASONS, [NO_REASON])
        discarded = dict[str, dict[str, int]]()
        for name, reason, count in cursor:
            discarded.setdefault(name, {})[reason] = count
        positions = _by_topic(cursor, "SELECT sink, topic, partition, next_offset FROM public.positions")
        bases = _by_topic(cursor, "SELECT sink, topic, key, version FROM public.base_versions")
        cursor.execute("SELECT name, duplicates, filtered FROM public.sinks ORDER BY name")
        states = list[SinkState]()
        for name, duplicates, filtered in cursor:
            counts = {"duplicates": duplicates, "filtered": filtered}
            state = SinkState(name, positions.get(name, {}), bases.get(name, {}), **counts)
            spec = declared.sink(name)
            if spec is None:
                states.append(replace(state, not_compared=UNDECLARED, is_declared=False))
            elif not state.positions or not state.positions.keys().isdisjoint(spec.decoders):
                comparisons = [ComparedRows(store, one, name) for one in declared.comparisons_of(name)]
                state = replace(
                    state,
                    versions=_versions(declared, spec, comparisons),
                    letters=set_aside.get(name, {}),
                    discarded=discarded.get(name, {}),
                    carries=spec.job.carries,
                    takes_states=spec.strategy.takes == "states",
                    not_compared="" if comparisons else NO_COMPARISON.format(folder_of(spec)),
                    failure=failures.get(name, ""),
                )
                if name in targets:
                    try:
                        state = with_target(state, targets[name])
                    except Failure as failure:
                        state = replace(state, not_compared=UNREADABLE, failure=failure.message)
                elif spec.target.is_elsewhere:
                    state = replace(state, not_compared=f"it is a copy, whose target is that of sink {spec.name}")
                states.append(state)
        of_declared = [state.name for state in states if state.is_declared]
        return Sinks(states, acknowledged(cursor, of_declared))


def erased(settings: Settings) -> frozenset[tuple[str, str]]:
    """The keys that are erased now: topic, and sha256 of the key."""
    return frozenset(query(settings, SinkRole.AUDITOR, "SELECT topic, encode(key_hash, 'hex') FROM public.erased_keys"))


def _targets(settings: Settings, declared: Declared) -> tuple[dict[str, TargetState], dict[str, str]]:
    """By sink the content of its target, if that is not in the sink database; and why some cannot be read."""
    found, failures = dict[str, TargetState](), dict[str, str]()
    for name, spec in declared.sinks.items():
        try:
            state = spec.target.state(settings, spec)
            if state is not None:
                found[name] = replace(state, totals=list(state.totals))
        except Failure as failure:
            found[name], failures[name] = TargetState(unread=UNREADABLE), failure.message
    return found, failures


def _versions(declared: Declared, spec: SinkSpec, compared: Iterable[ComparedRows]) -> dict[str, dict[str, int]]:
    """By topic and key the highest version that the sink has applied, as its comparisons of totals say."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for one in compared:
        addends = declared.addends(spec, one.comparison)
        topics = {kind.topic for kind, addend in zip(declared.kinds, addends, strict=True) if addend is not None}
        if not one.comparison.columns and len(topics or spec.decoders) == 1:
            [topic] = topics or spec.decoders
            for key, version in one.versions().items():
                found[topic][key] = max(version, found[topic].get(key, version))
    return found


def with_target(state: SinkState, target: TargetState) -> SinkState:
    """The state of a sink whose result is not in the sink database: positions and dead letters as of that result.

    If that result cannot be read, its open dead letters count as set aside, as for other sinks.
    """
    if target.unread:
        return replace(state, not_compared=target.unread)
    letters = state.letters
    if target.lacking is not None:
        named = {identity for identity in letters if not identity.startswith("sha256:")}  # by an event's id
        lacking = set(target.lacking({event_id for event_id in named if letters[event_id].is_open}))
        # The target finds events by id: any record of an event will do, not only the one that its letter names.
        letters = {
            identity: letter._replace(place=None)
            for identity, letter in letters.items()
            if identity in lacking or identity not in named or not letter.is_open
        }
    positions = {**state.positions, **target.positions}
    return replace(state, positions=positions, letters=letters, may_be_ahead=target.may_be_ahead)


def totals_of(sink: str, target: TargetState) -> list[Row]:
    """The totals of a sink that its target says. Several rows of a key are added up."""
    totals, versions = dict[str, Decimal](), dict[str, int]()
    for key, total, version in target.totals:
        if key is not None:
            totals[str(key)] = EXACT.add(totals.get(str(key), Decimal(0)), Decimal(total or 0))
        if key is not None and version is not None:
            versions[str(key)] = max(version, versions.get(str(key), version))
    return [(sink, key, versions.get(key), text_of(total)) for key, total in totals.items()]


def _queries(declared: Declared, targets: Mapping[str, TargetState]) -> list[Comparison]:
    """The comparisons whose totals are in the sink database."""
    found: dict[str, Comparison] = {}
    for name, of_sink in declared.comparisons.items():
        if name in targets:
            for one in [*of_sink[1:], *(one for one in of_sink if one.columns)]:
                raise unusable(one.file, f"sink {name} has one total, which its target says", "keep one file of totals")
            continue
        for one in of_sink:
            if one.sink is None:
                raise unusable(one.file, "it has no section `-- [sink]`", "write the query of the sinks' totals")
            found[one.id] = one
    return list(found.values())


def _by_topic(cursor: extensions.cursor, query: str) -> dict[str, dict[str, dict[Any, int]]]:
    found: dict[str, dict[str, dict[Any, int]]] = {}
    cursor.execute(query)
    for sink, topic, name, value in cursor:
        found.setdefault(sink, {}).setdefault(topic, {})[name] = value
    return found


# Dead letters -------------------------------------------------------------------------------------------------------


def _letters(
    connection: extensions.connection, declared: Declared, elsewhere: Collection[str] = ()
) -> dict[str, dict[str, Letter]]:
    """The letters by sink and identity: those that are open, and those that were discarded and have an event id. The
    identity of a letter is the event id, or a hash if the record has none.

    Some sinks have their results ``elsewhere``, and a restored result may be older than a replay. So replayed letters
    of these sinks count as open too, if the place says whether it has their events. A topic is not restored.
    """
    topics = declared.topic_by_name
    found: dict[str, dict[str, Letter]] = defaultdict(dict)
    letters = stream(connection, LETTERS, [list(elsewhere)])
    while some := [_Stored(*row) for row in islice(letters, DECODED_AT_ONCE)]:
        for row in some:
            place = TopicOffset(row.partition, row.offset)
            key = bytes(row.key or b"")[:KEY_MAX_BYTES].decode(errors="replace")
            found[row.sink][row.identity] = Letter(
                row.topic, key, row.is_open, None if row.is_event else place, row.is_event, origin=place
            )
        for topic in {row.topic for row in some if row.is_event} & topics.keys():
            events = [row for row in some if row.topic == topic and row.is_event]
            for event in _decoded(topics[topic], events):
                sink, event_id = events[event["offset"]].sink, event["event_id"]
                texts = [event[f"n{place}"] for place in range(len(topics[topic].properties))]
                numbers = declared.numbers[event["kind"]].of(texts)
                letter = found[sink][event_id]
                found[sink][event_id] = letter._replace(kind=event["kind"], version=event["version"], numbers=numbers)
    return found


def acknowledged(cursor: extensions.cursor, sinks: Collection[str]) -> frozenset[str]:
    """Identities of which these sinks have letters, all closed: discarded, or the event of that id was applied."""
    cursor.execute(ACKNOWLEDGED, [list(sinks)])
    return frozenset(identity for (identity,) in cursor)


class _Stored(NamedTuple):
    """A letter as it is stored; key, headers and value of a valid event are whole."""

    sink: str
    identity: str
    is_open: bool
    topic: str
    partition: int
    offset: int
    is_event: bool
    key: memoryview | None
    headers: list[dict[str, Any]] | None
    value: memoryview | None
    recorded_ms: int


def _decoded(topic: EventTopic, events: Sequence[_Stored]) -> list[dict[str, Any]]:
    """The events of letters as they are decoded today; those that are no events are left out."""
    records = Records(
        keys=[dead_records.content(letter.key) for letter in events],
        headers=[dead_records.headers(letter.headers or ()) for letter in events],
        values=[dead_records.content(letter.value) for letter in events],
        recorded_ms=[letter.recorded_ms for letter in events],
        partitions=[0] * len(events),
        offsets=range(len(events)),  # so that each finds its letter
    )
    from outbox.audit.store import delivered

    found: list[dict[str, Any]] = delivered(topic, topic.decoder.decode(records).rows).to_pylist()
    return found
