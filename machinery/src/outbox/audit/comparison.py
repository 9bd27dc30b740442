"""Compare source, topics and sinks, after all of them were read. DuckDB joins the rows; Python judges the unusual ones.

Which events count
    A record that breaks the contract counts in no drift, gap or loss. If it is an event of the outbox, nobody knows
    what it should have added. So its key is *uncertain*, and not compared, for every sink that has set it aside or not
    read it yet. A record whose dead letter was discarded is acknowledged: it is no finding any more.

In flight or lost
    The relay keeps the order of commits. An event of the outbox that is not on its topic is lost if a later event of
    its key is there: one with a higher version. Events without versions are compared by time: a lost one is more than
    `LATE_MS` older than another event that was relayed. Other missing events are in flight, unless they are so old that
    the topic has dropped them.

Foreign or pruned
    An event on a topic that the outbox does not have was deleted by `outbox prune`, or never was there. It is
    *foreign*, never there, if either is true:

    - Its version is higher than the version of its key in the source.
    - The outbox still has an older event that stands before it in the same partition. That one was committed first,
      because the relay keeps the order of commits. Prune deletes every relayed event up to a time, so it would have
      deleted the older one too. `CLOCK_MARGIN_MS` allows for the two ways in which a row notes its time.

    Every other event counts as pruned. The keep-hours of prune prove nothing: a run may have used others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from outbox.audit.declared import Declared, EventTopic
from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.audit.rows import ComparedRows, difference_of
from outbox.audit.sinks import Sinks, SinkState, TopicOffset
from outbox.audit.source import LATE_MS, Source
from outbox.audit.store import Store, TopicLogs
from outbox.audit.tally import Event, Fate, Tally
from outbox.audit.verified import Doubt, TopicPoint, Verified, VerifiedKey
from outbox.base.terminal import Progress
from outbox.sink.rows import Difference

PASS_ROWS = 8_000_000  # as many as DuckDB joins within its memory
CLOCK_MARGIN_MS = 1_000  # between the time inside a UUIDv7 and occurred_at of the same row
NO_VERSIONS = "a query has no column version, by which states are compared"

TOPIC = {"topic": pa.uint16()}
BY_KEY = {**TOPIC, "key": pa.string()}
WRITTEN = {
    **TOPIC,
    "kind": pa.uint16(),
    "event_id": pa.string(),
    "key": pa.string(),
    "version": pa.int64(),
    "occurred_ms": pa.int64(),
    "numbers": pa.list_(pa.string()),
    "payload": pa.string(),
}
VERIFIED = {**BY_KEY, "lowest": pa.int64(), "highest": pa.int64(), "partition": pa.int32()}
POSITION = {**TOPIC, "partition": pa.int32(), "next_offset": pa.int64()}
ROWS = "SELECT (SELECT count(*) FROM delivered) + (SELECT count(*) FROM refused) + (SELECT count(*) FROM written)"
# Tables, each made in passes over the rows whose hash has this remainder.
REPEATS = """
SELECT topic, id, min((partition, "offset")) AS first FROM delivered WHERE hash(id) % {passes} = {number}
 GROUP BY ALL HAVING count(*) > 1
"""
REFUSED_EVENTS = """
SELECT DISTINCT ON (topic, id) topic, id, key, partition, "offset" FROM refused
 WHERE id IS NOT NULL AND hash(id) % {passes} = {number} ORDER BY topic, id, partition, "offset"
"""
# By id the first record of an event, its row in the outbox, or both: with a partition, with a time, or with both.
EVENTS = """
SELECT topic, id, coalesce(record.kind, row.kind) AS kind, coalesce(record.key, row.key) AS key,
       coalesce(record.version, row.version) AS version, coalesce(record.numbers, row.numbers) AS numbers,
       CASE WHEN partition IS NULL THEN payload END AS payload, partition, "offset", occurred_ms
  FROM (SELECT delivered.* FROM delivered LEFT JOIN repeats USING (topic, id)
         WHERE hash(id) % {passes} = {number} AND (first IS NULL OR first = (partition, "offset"))) AS record
  FULL JOIN (FROM written WHERE hash(id) % {passes} = {number}) AS row USING (topic, id)
"""
# Versions that events on the topic have, foreign ones left out.
VERSIONS = """
SELECT topic, key, min(version) AS lowest, max(version) AS highest, count(*) AS versions,
       count(*) FILTER (events > 1) AS repeated
  FROM (SELECT topic, key, version, count(*) AS events FROM relayed
         WHERE NOT is_foreign AND version IS NOT NULL AND hash(key, version) % {passes} = {number} GROUP BY ALL)
 GROUP BY ALL
"""
# Keys that were erased: `outbox erase` has deleted their rows, old and new.
ERASED = """
CREATE OR REPLACE TABLE erased AS SELECT DISTINCT topic, key FROM events
 WHERE {are_any} AND EXISTS (FROM erased_hashes WHERE erased_hashes.topic = events.topic AND key_hash = sha256(key));
"""
# By partition the first of those records whose event the outbox has; the relay has come as far as `latest_ms`.
EARLIEST = f"""
CREATE OR REPLACE TABLE earliest AS
SELECT topic, partition, min("offset") AS "offset", arg_min(occurred_ms, "offset") AS occurred_ms,
       max(occurred_ms) AS latest_ms
  FROM events WHERE partition IS NOT NULL AND occurred_ms IS NOT NULL GROUP BY ALL;

CREATE OR REPLACE VIEW relayed AS
SELECT events.*,
       events.occurred_ms IS NULL AND erased.key IS NULL
       AND (coalesce(events.version > source_versions.version, false)
            OR coalesce(earliest."offset" < events."offset"
                        AND earliest.occurred_ms + {CLOCK_MARGIN_MS} < made_at_ms(id), false)) AS is_foreign
  FROM events LEFT JOIN source_versions USING (topic, key) LEFT JOIN earliest USING (topic, partition)
  LEFT JOIN erased USING (topic, key)
 WHERE partition IS NOT NULL;
"""  # noqa: S608
KEYS = """
CREATE OR REPLACE TABLE keys AS
SELECT topic, key, least(read.lowest, verified_keys.lowest) AS lowest,
       greatest(read.highest, verified_keys.highest) AS highest,
       coalesce(versions, 0) + coalesce(verified_keys.highest - verified_keys.lowest + 1, 0) AS versions,
       coalesce(repeated, 0) AS repeated
  FROM (SELECT topic, key, min(lowest) AS lowest, max(highest) AS highest, sum(versions) AS versions,
               sum(repeated) AS repeated
          FROM versions GROUP BY ALL) AS read
  FULL JOIN verified_keys USING (topic, key);
"""
UNUSUAL = """
SELECT topic, relayed.partition, "offset", occurred_ms IS NOT NULL
  FROM relayed JOIN verified_topics USING (topic) LEFT JOIN verified_keys USING (topic, key)
 WHERE occurred_ms IS NULL OR version <= highest LIMIT 1
"""
PRUNED = "SELECT topic, count(*) FROM relayed WHERE occurred_ms IS NULL AND NOT is_foreign GROUP BY topic"
# By code of a problem: topic, how many there are, the first and the worst of them.
PROBLEMS = {
    # Each record that breaks the contract explains one version that no event on the topic has.
    "versions-missing": """
SELECT topic, sum(missing)::BIGINT, '', arg_max(format('key {}, {}', key, missing), (missing, key))
  FROM (SELECT topic, key, (highest::HUGEINT - lowest + 1 - versions - coalesce(refused, 0))::BIGINT AS missing
          FROM keys LEFT JOIN (SELECT topic, key, count(*) AS refused FROM refused_events GROUP BY ALL)
               USING (topic, key))
 WHERE missing > 0 GROUP BY topic
""",
    "versions-repeated": """
SELECT topic, count(*), min(format('key {}, version {}: {} and {}', key, version, ids[1], ids[2])), ''
  FROM (SELECT topic, key, version, min(masked(id)::VARCHAR, 2) AS ids
          FROM relayed SEMI JOIN (FROM keys WHERE repeated > 0) AS keys USING (topic, key)
         WHERE NOT is_foreign AND version IS NOT NULL GROUP BY ALL HAVING count(*) > 1)
 GROUP BY topic
""",
    "keys-spread": """
SELECT topic, count(*), min(format('key {}, partitions {}', key, partitions)), ''
  FROM (SELECT topic, key, array_to_string(list_sort(list(partition)), ', ') AS partitions
          FROM (SELECT topic, key, partition FROM delivered UNION SELECT topic, key, partition FROM verified_keys)
         GROUP BY ALL HAVING count(*) > 1)
 GROUP BY topic
""",
    # The oldest is the first, because UUIDv7s sort by time. The worst has the largest number.
    "foreign-events": """
SELECT topic, count(*), min(place), arg_min(place, (-size, place))
  FROM (SELECT topic, coalesce(list_max([abs(TRY_CAST(one AS DOUBLE)) FOR one IN numbers]), 0) AS size,
               format('{} at partition {}, offset {}, key {}', masked(id)::VARCHAR, partition, "offset", key) AS place
          FROM relayed WHERE is_foreign)
 GROUP BY topic
""",
}
MALFORMED = """
SELECT topic, histogram(reason) FILTER (NOT is_closed), count(*) FILTER (is_closed),
       arg_min(format('partition {}, offset {}: {}', partition, "offset", detail), (partition, "offset"))
       FILTER (NOT is_closed)
  FROM (SELECT refused.*, identity IN (FROM acknowledged)
               OR (topic, sha256(coalesce(key, ''))) IN (SELECT (topic, key_hash) FROM erased_hashes) AS is_closed
          FROM refused)
 GROUP BY topic
"""
UNRELAYED = """
SELECT events.topic, masked(id)::VARCHAR, events.kind, events.key, events.version, events.numbers, events.payload,
       refused_events.partition, refused_events."offset", occurred_ms, keys.lowest, keys.highest
  FROM events LEFT JOIN refused_events USING (topic, id)
  LEFT JOIN keys ON keys.topic = events.topic AND keys.key = events.key
  LEFT JOIN verified_keys ON verified_keys.topic = events.topic AND verified_keys.key = events.key
 WHERE events.partition IS NULL AND NOT coalesce(events.version <= verified_keys.highest, false)
"""
DUPLICATES = """
SELECT topic, kind, key, numbers FROM delivered JOIN repeats USING (topic, id) WHERE first <> (partition, "offset")
"""
# Events on the topics that some sink has not read, or has set aside as a dead letter.
UNAPPLIED = """
SELECT topic, masked(id)::VARCHAR, kind, key, version, numbers, NULL, partition, "offset", is_foreign
  FROM relayed JOIN read_topics USING (topic) LEFT JOIN read_positions USING (topic, partition)
 WHERE "offset" >= coalesce(next_offset, 0) OR id IN (SELECT id FROM lettered)
"""
# Of a topic, up to the point that all sinks have reached.
APPLIED_KEYS = """
SELECT key, min(lowest), max(highest), min(partition)
  FROM (SELECT key, version AS lowest, version AS highest, partition
          FROM delivered JOIN verified_positions USING (topic, partition)
         WHERE topic = $topic AND "offset" < next_offset
         UNION ALL SELECT key, lowest, highest, partition FROM verified_keys WHERE topic = $topic)
 GROUP BY key
"""
# Rows of the outbox that are not verified, because their record is not before the point.
OPEN = """
SELECT min(occurred_ms)
  FROM events LEFT JOIN verified_keys USING (topic, key)
  LEFT JOIN refused_events ON refused_events.topic = events.topic AND refused_events.id = events.id
  LEFT JOIN verified_positions ON verified_positions.topic = events.topic
        AND verified_positions.partition = coalesce(events.partition, refused_events.partition)
 WHERE events.topic = $topic AND NOT coalesce(version <= highest, false)
   AND NOT coalesce(coalesce(events."offset", refused_events."offset") < next_offset, false)
"""


@dataclass(frozen=True)
class Observed:
    """The data to compare, in the order in which it was read: sinks, topics, source."""

    declared: Declared
    sinks: Sinks
    logs: TopicLogs
    source: Source


class _Topic:
    """A topic of the comparison."""

    def __init__(self, seen: Observed, topic: EventTopic, point: TopicPoint, tallies: Iterable[Tally]) -> None:
        self.declared, self.point = topic, point
        self.log = seen.logs.ends[topic.number]
        self.states = [tally.state for tally in tallies if topic.name in tally.topics]
        self._positions = [state.positions.get(topic.name, {}) for state in self.states]
        self.latest_ms = 0  # the time of the outbox's latest event that is on the topic
        self.report = TopicReport(topic.name, records=self.log.records)
        self.first_malformed = ""
        if not point.is_beginning:
            if self.log.has_gap:
                raise Doubt(f"topic {topic.name} has dropped records that were not read")
            point.require_usual(topic.name, self.states, seen.source.versions.get(topic.name), seen.sinks)

    def fate(self, event: Event, occurred_ms: int, lowest: int | None, highest: int | None) -> Fate:
        """The fate of an event that the topic does not have. The topic has these versions of its key."""
        if not self.log.is_whole and self._is_dropped(event, occurred_ms, lowest):
            return "aged out"
        if event.version is None:
            return "lost" if occurred_ms + LATE_MS < self.latest_ms else "in flight"
        return "lost" if highest is not None and event.version < highest else "in flight"

    def _is_dropped(self, event: Event, occurred_ms: int, lowest: int | None) -> bool:
        """Whether a topic that is not whole has dropped an event, as far as its key or its time tells."""
        if event.version is not None:
            if lowest is not None:
                return event.version < lowest
            applied = [state.versions.get(self.declared.name, {}) for state in self.states]
            if any(applied):
                return event.version <= max(versions.get(event.key, 0) for versions in applied)
        return occurred_ms <= self.log.dropped_until_ms

    def read_by_all(self) -> dict[int, int]:
        """By partition, how far all sinks have read the topic. Sinks that lack a partition have not begun with it."""
        partitions = {partition for one in self._positions for partition in one}
        return {partition: min(one.get(partition, 0) for one in self._positions) for partition in partitions}

    def next_offsets(self) -> dict[int, int]:
        """The offsets up to which all sinks have applied what was read of the topic."""
        return {
            partition: min([offset, *(one.get(partition, 0) for one in self._positions)])
            for partition, offset in self.log.next_offsets.items()
        }


class _Comparison:
    """The comparison of all topics and sinks of events."""

    def __init__(self, seen: Observed, verified: Verified) -> None:
        self._seen, self._store = seen, seen.logs.store
        of_events = [state for state in seen.sinks.states if state.carries == "events"]
        self._tallies = [Tally(state, seen.declared, seen.source, self._store) for state in of_events]
        self._topics = [
            _Topic(seen, topic, verified.topic(topic.name), self._tallies) for topic in seen.declared.topics
        ]
        of_states = [state for state in seen.sinks.states if state.carries == "states"]
        self.report = Report(
            topics=[topic.report for topic in self._topics],
            sinks=[
                *(tally.report for tally in self._tallies),
                *(compare_states(seen.declared, state, self._store) for state in of_states),
            ],
        )

    def run(self, progress: Progress) -> None:
        """Fill the report."""
        steps = [
            self._load,
            self._join,
            self._count_delivered,
            self._count_refused,
            self._count_unrelayed,
            self._find,
            self._tally_delivered,
        ]
        for done, step in enumerate(steps, start=1):
            step()
            progress(f"compared {100 * done // len(steps)} %")
        for tally in self._tallies:
            tally.compare(self._seen.sinks)

    def _load(self) -> None:
        """Put what is compared into tables."""
        source, load = self._seen.source, self._store.load
        points = [topic.point for topic in self._topics]
        load("written", WRITTEN, source.events, "* EXCLUDE event_id, masked(event_id) AS id")
        versions = (source.versions.get(topic.declared.name, {}).items() for topic in self._topics)
        load("source_versions", {**BY_KEY, "version": pa.int64()}, _numbered(versions))
        load("read_positions", POSITION, _numbered(topic.read_by_all().items() for topic in self._topics))
        load("read_topics", TOPIC, _numbered([()] if topic.states else [] for topic in self._topics))
        identity = {"identity": pa.string()}
        lettered = {one for tally in self._tallies for one in tally.state.letters}
        load("lettered", identity, ((one,) for one in lettered), "identity, masked(TRY_CAST(identity AS UUID)) AS id")
        load("acknowledged", identity, ((one,) for one in self._seen.sinks.acknowledged))
        hashes = (
            [(hash_,) for topic, hash_ in self._seen.sinks.erased if topic == one.declared.name] for one in self._topics
        )
        load("erased_hashes", {**TOPIC, "key_hash": pa.string()}, _numbered(hashes))
        load("verified_topics", TOPIC, _numbered([] if point.is_beginning else [()] for point in points))
        load("verified_keys", VERIFIED, _numbered(((key, *one) for key, one in point.keys.items()) for point in points))

    def _join(self) -> None:
        """Join topics and outbox by event id."""
        store = self._store
        [(rows,)] = store.rows(ROWS)
        passes = 1 + rows // PASS_ROWS
        store.make("repeats", REPEATS, passes)
        store.make("refused_events", REFUSED_EVENTS, passes)
        store.make("events", EVENTS, passes)
        store.run(ERASED.format(are_any=bool(self._seen.sinks.erased)))
        store.run(EARLIEST)
        store.make("versions", VERSIONS, passes)
        store.run(KEYS)
        for topic, latest_ms in store.rows("SELECT topic, max(latest_ms) FROM earliest GROUP BY topic"):
            self._topics[topic].latest_ms = latest_ms
        for topic, partition, offset, is_written in store.rows(UNUSUAL):
            what = "repeats a version that was verified" if is_written else "is not in the outbox"
            name, place = self._topics[topic].declared.name, TopicOffset(partition, offset)
            raise Doubt(f"topic {name}: the event at {place} {what}")

    def _count_delivered(self) -> None:
        """Count the events of the outbox, and those on the topics that it does not have any more."""
        for topic, count in self._store.rows("SELECT topic, count(*) FROM written GROUP BY topic"):
            self._topics[topic].report.outbox_events = count
        for topic, count in self._store.rows(PRUNED):
            self._topics[topic].report.pruned = count

    def _count_refused(self) -> None:
        """Count the records that break the contract. Those that were discarded are acknowledged."""
        for topic, reasons, acknowledged, first in self._store.rows(MALFORMED):
            self._topics[topic].report.malformed = reasons or {}
            self._topics[topic].report.acknowledged = acknowledged
            self._topics[topic].first_malformed = first or ""
        for topic, identity in self._store.rows(
            "SELECT DISTINCT topic, identity FROM refused SEMI JOIN lettered USING (identity)"
        ):
            for tally in self._tallies:
                tally.meet(self._topics[topic].declared.name, identity)

    def _count_unrelayed(self) -> None:
        """Count the events of the outbox that are not on their topic, or that break the contract there."""
        for *values, occurred_ms, lowest, highest in self._store.rows(UNRELAYED):
            event = Event(*values)
            is_refused = event.place is not None
            fate: Fate = "relayed"
            if not is_refused and event.event_id in self._seen.sinks.acknowledged:
                fate = "aged out"
            elif not is_refused:
                topic = self._topics[event.topic]
                fate = topic.fate(event, occurred_ms, lowest, highest)
                topic.report.in_flight += fate == "in flight"
                if fate == "lost":
                    topic.report.lost.append(event.event_id)
            for tally in self._tallies:
                tally.add(event, fate, is_refused=is_refused)

    def _find(self) -> None:
        """Note what is wrong with the topics."""
        for topic in self._topics:
            report, malformed = topic.report, topic.report.malformed
            count = sum(malformed.values())
            report.find("nothing-compared", report.records if count == report.records else 0)
            reasons = sorted(malformed, key=lambda one: -malformed[one])
            detail = ": " + ", ".join(f"{reason} {malformed[reason]}" for reason in reasons)
            report.find("malformed-records", count, topic.first_malformed, detail=detail)
            report.lost.sort()  # the oldest first: UUIDv7s sort by time
            report.find("events-lost", len(report.lost), first=next(iter(report.lost), ""))
        for code, query in PROBLEMS.items():
            for number, count, first, worst in self._store.rows(query):
                report = self._topics[number].report
                known = len(report.lost) if code == "versions-missing" else 0  # each lost event is a missing version
                report.find(code, max(0, count - known), first, worst)

    def _tally_delivered(self) -> None:
        """Count for each sink the events on the topics that it has not applied, and the duplicates."""
        for *values, is_foreign in self._store.rows(UNAPPLIED):
            event = Event(*values)
            for tally in self._tallies:
                tally.add(event, is_foreign=is_foreign)
        for topic, kind, key, texts in self._store.rows(DUPLICATES):
            self._topics[topic].report.repeated[self._seen.declared.kinds[kind].event] += 1
            for tally in self._tallies:
                tally.repeat(key, kind, texts)

    def verified(self, of: str) -> Verified:
        """The point up to which all sinks have applied the topics. Call it if nothing was found wrong."""
        known = [
            topic
            for topic in self._topics
            if topic.declared.decoder.version is not None and topic.declared.name in self._seen.source.versions
        ]
        offsets = [topic.next_offsets().items() if topic in known else () for topic in self._topics]
        self._store.load("verified_positions", POSITION, _numbered(offsets))
        return Verified(of, {topic.declared.name: self._point(topic) for topic in known})

    def _point(self, topic: _Topic) -> TopicPoint:
        """The point up to which all sinks have applied a topic."""
        name, next_offsets = topic.declared.name, topic.next_offsets()

        def rows(query: str) -> Iterator[tuple[Any, ...]]:
            return self._store.rows(query, {"topic": topic.declared.number})

        [(open_ms,)], read_at_ms = rows(OPEN), self._seen.source.read_at_ms
        return TopicPoint(
            topic_id=topic.log.topic_id or "",
            next_offsets=next_offsets,
            keys={key: VerifiedKey(*values) for key, *values in rows(APPLIED_KEYS)},
            since_ms=min(read_at_ms, open_ms or read_at_ms) - LATE_MS,
            letters={state.name: state.digest_of_letters(name, next_offsets) for state in topic.states},
        )


def compare(seen: Observed, progress: Progress, verified: Verified | None = None) -> Report:
    """Compare the source with the topics and the sinks.

    Its memory grows with the number of keys, and not with the number of events. With ``verified`` the report says up to
    where everything is verified. If source and logs begin at that point, it may raise Doubt.
    """
    comparison = _Comparison(seen, verified or Verified())
    comparison.run(progress)
    if verified is not None and not comparison.report.findings:
        comparison.report.verified = comparison.verified(verified.of)
    return comparison.report


def compare_states(declared: Declared, state: SinkState, store: Store) -> SinkReport:
    """Compare the source with a sink of states that was read before it.

    A key with the source's version must have its total, or row. A key that is behind is in flight, by as many versions:
    its total says nothing yet. So is a key whose change is lost or set aside, until the next change makes up for it. A
    key that the source does not have must have the total 0, or no row.
    """
    report = SinkReport.of(state)
    report.parked = sum(letter.is_open for letter in state.letters.values())
    for comparison in () if state.not_compared else declared.comparisons_of(state.name):
        rows = ComparedRows(store, comparison, state.name)
        compared, in_flight = ComparisonReport.of(rows), 0
        report.comparisons.append(compared)
        if not rows.have_versions:
            compared.not_compared = NO_VERSIONS
            continue
        for key, due, has, source, sink in rows.differing():
            # A key begins with version 0, and that is a change too.
            behind = (due or 0) - (-1 if has is None else has)
            if source is not None and behind > 0:
                in_flight += behind
            elif comparison.columns:
                compared.differences.add(Difference.of(key, source, sink))
            elif difference := difference_of(source, sink):
                compared.drift[key] = difference
        report.in_flight = max(report.in_flight, in_flight)
    return report


def _numbered(rows: Iterable[Iterable[tuple[Any, ...]]]) -> Iterator[tuple[Any, ...]]:
    """Rows of the topics in their order, each with the number of its topic before it."""
    return ((number, *row) for number, of_topic in enumerate(rows) for row in of_topic)
