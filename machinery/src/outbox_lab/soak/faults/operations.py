"""Operations of people at any time: commands beside everything, rebuilds, dead letters; and hostile records.

Commands hold no part, so they also run while other faults break what they need. An expected failure has a code (see
`outbox_lab.soak.testbed.Done`). Any other end, such as a traceback, means that the fault has not happened.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.events import catalog
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config
from outbox.sink import discovery
from outbox.sink.remembering import fence
from outbox.sink.repair.rebuild import derived_tables
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.history import WRONG_RESULT, checked
from outbox_lab.soak.nemesis import NotFired, Strike, despite_faults, run, wait_or_not_fired
from outbox_lab.soak.testbed import SLOT_AHEAD, Done, Testbed

Place = tuple[int, int]  # partition and offset

# Commands ----------------------------------------------------------------------------------------------------------

FROM_FAULTS = {"malformed-records", "sink-parked"}  # what `outbox check` may find while other faults last


def prune(strike: Strike) -> str:
    # The relay may be down, or behind.
    refusals = {"events-not-on-topic", "prune-running", "sinks-busy"}
    return f"outbox prune: {run(strike.testbed, 'prune', '--keep-hours', '0', temporary=refusals).end}"


def check(strike: Strike) -> str:
    """Run `outbox check`. Its findings must come from other faults, and must be no loss."""
    testbed = strike.testbed
    done = run(testbed, "check", "--incremental", "--json", expected={"problems-found"})
    known = discovery.sinks(testbed.settings)
    for found in checked(strike.fault.name, json.loads(done.output)).problems:
        may_drift = found.sink in known and known[found.sink].strategy.repeats != "all"
        if found.code not in (FROM_FAULTS | WRONG_RESULT if may_drift else FROM_FAULTS):
            raise NotFired(f"outbox check reports {found.code}: {found.message}")
    return f"outbox check: {done.code or 'it succeeded'}"


def apply_connectors(strike: Strike) -> str:
    """`outbox connect apply` of each connector. It may find a worker that is down, or a hanging transaction."""
    testbed, done = strike.testbed, list[str]()
    for connector in testbed.connectors:
        expected, temporary = {"connector-not-running", "connector-failed", "connect-refused"}, set[str]()
        if not testbed.settings.exactly_once:  # then the slot may be ahead while the connector runs
            if connector.is_outbox:
                temporary.add("slot-ahead")  # until its topics show that no event is missing
            else:
                expected |= SLOT_AHEAD  # nothing shows that for a captured table
        command = connector.command("apply")
        links = ("debezium-postgres",)  # else the connector loses its link
        found = run(testbed, *command.split()[1:], expected=expected, temporary=temporary, links=links)
        done.append(f"{command}: {found.code or found.end}")
    return "; ".join(done)


def rebuild(strike: Strike, source: str) -> str:
    """The rebuild of a sink, from the topic or from the source."""
    testbed = strike.testbed
    sink = strike.chance.choice(rebuildable(testbed, source))
    strike.victims = (testbed.process_of(sink).name,)  # it ends when it sees the rebuild
    testbed.check(f"before {strike.fault.name}")
    return run(testbed, "rebuild", sink, "--from", source, "--yes").end


def rebuildable(testbed: Testbed, source: str) -> list[str]:
    """The sinks of which a rebuild computes the same result. It does not count repeats again, and makes no Delta table.

    From the source it needs SQL of each projection, which some sinks have not, such as those of captured tables.
    """
    found = list[str]()
    for sink in testbed.sink_specs:
        with suppress(Failure):
            sink.target.require_rebuildable(sink, source)
            if source == "source":
                derived_tables(sink)
            if sink.strategy.repeats == "all":
                found.append(sink.name)
    return found


# Dead letters ------------------------------------------------------------------------------------------------------

APPLIED = "SELECT name FROM public.sinks WHERE name = %s AND applied > 0"
OPEN = "SELECT count(*) FROM public.dead_letters WHERE sink = %s AND reason = %s AND status = 'open'"


def replay_letters(strike: Strike) -> str:
    done = _replay(strike.testbed, "--all")
    return f"outbox dead-letters replay --all: {done.code or done.end}"


def _replay(testbed: Testbed, *words: str) -> Done:
    """Letters of hostile records stay open."""
    return run(testbed, "dead-letters", "replay", *words, expected={"dead-letters-stay-open"})


def refuse_events(strike: Strike) -> str:
    testbed = strike.testbed
    strike.sink = strike.chance.choice(sorted(refusing(testbed)))
    before = _count_open(strike)
    what = f"{strike.sink} to apply events"  # its rules may be in the rows that it has
    wait_or_not_fired(what, lambda: testbed.query(APPLIED, [strike.sink], SinkRole.AUDITOR), timeout_s=120, poll_s=0.5)
    _change_rules(strike, testbed.options.refusals[strike.sink].begin)
    what = f"{strike.sink} to refuse events"
    count = wait_or_not_fired(what, lambda: _count_open(strike) - before, timeout_s=120, poll_s=0.5)
    return f"{strike.sink} has refused {count} events"


def accept_events(strike: Strike) -> None:
    """Replay dead letters until none is left: a batch that was under way may add some after the first replay."""
    if not strike.sink:
        return
    refusal = strike.testbed.options.refusals[strike.sink]
    _change_rules(strike, refusal.end)

    def replayed() -> bool:
        _replay(strike.testbed, "--sink", strike.sink, "--reason", refusal.reason)
        return not _count_open(strike)

    wait_for(f"the dead letters of {strike.sink} to be replayed", replayed, timeout_s=120, poll_s=2)


def refusing(testbed: Testbed) -> set[str]:
    """The sinks that the domain can make refuse events."""
    return testbed.options.refusals.keys() & set(testbed.sink_names)


def _change_rules(strike: Strike, statement: str) -> None:
    """Run a statement between two transactions of the sink."""
    opened = connect(strike.testbed.settings, SinkRole.OWNER)
    with closing(opened) as connection, connection, connection.cursor() as cursor:
        fence.lock(cursor, strike.sink)
        cursor.execute(statement)


def _count_open(strike: Strike) -> int:
    parameters = [strike.sink, strike.testbed.options.refusals[strike.sink].reason]
    return int(strike.testbed.query(OPEN, parameters, SinkRole.AUDITOR)[0][0])


# Hostile records, by a producer that is not the relay. Each is invalid, and becomes a dead letter of every sink that
# asks for such events.

POSITIONS = "SELECT sink, partition, next_offset FROM public.positions WHERE topic = %s AND sink = ANY(%s)"
RECORDS = 20
HUGE_BYTES = 900_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DECADES_MS = 365 * DAY_MS * 30
Headers = Mapping[str, bytes | None]
LETTERS_TIMEOUT_S = 300.0  # sinks may be down, or begin again
LETTERS_OF_ALL = "SELECT event_id::text FROM public.dead_letters WHERE topic = %s"
LETTERS = """
SELECT sink, identity, partition, "offset", event_id::text FROM public.dead_letters WHERE topic = %s AND sink = ANY(%s)
"""


class HostileRecord(NamedTuple):
    """A record for a topic."""

    key: bytes | None
    headers: Headers
    value: bytes | None


Delivered = Mapping[Place, HostileRecord]
Make = Callable[[Testbed, str, random.Random], Iterator[HostileRecord]]  # records for a topic


def discard_letters(strike: Strike) -> None:
    """Give up their letters, as an operator does who has found their producer. No valid event has these identities."""
    identities = sorted(strike.letters)
    for start in range(0, len(identities), 100):
        some = identities[start : start + 100]
        run(strike.testbed, "dead-letters", "discard", *some, "--because", "a hostile record of the soak")


def send(strike: Strike, make: Make) -> str:
    """Send records to a topic. It has happened once all sinks have read them and set them aside."""
    testbed = strike.testbed
    topic = strike.chance.choice(sorted(catalog.of_project(testbed.settings).topics))
    sinks = testbed.readers(topic)
    if not sinks:
        raise NotFired(f"no sink reads topic {topic}")
    made = list(make(testbed, topic, strike.chance))
    strike.invalid = len(made)  # one that fails may be there too
    delivered = _produce(testbed, topic, made)
    names = [one.name for one in sinks]

    def read() -> list[list[str]]:
        positions = testbed.query(POSITIONS, [topic, names], SinkRole.AUDITOR)
        ends = {(sink, partition): next_offset for sink, partition, next_offset in positions}
        is_read = all(ends.get((sink, partition), 0) > offset for sink in names for partition, offset in delivered)
        return [_without_letter(strike, sinks, topic, delivered)] if is_read else []

    what = f"{', '.join(names)} to read the records"
    [lacking] = wait_or_not_fired(what, despite_faults(read), timeout_s=LETTERS_TIMEOUT_S, poll_s=1)
    if lacking:
        raise NotFired(f"{len(lacking)} records became no dead letter: {', '.join(lacking[:5])}")
    return f"{topic}: {len(sinks)} sinks set {len(delivered)} records aside"


def _produce(testbed: Testbed, topic: str, made: Sequence[HostileRecord]) -> Delivered:
    """Send records, and return where they are. Raises NotFired if one does not arrive."""
    delivered: dict[Place, HostileRecord] = {}
    producer = Producer({**client_config(testbed.settings), "message.max.bytes": 2_000_000, "enable.idempotence": True})
    failed: list[str] = []
    for record in made:

        def arrived(error: KafkaError | None, message: Message, record: HostileRecord = record) -> None:
            if error is not None:
                failed.append(str(error))
            else:
                delivered[message.partition() or 0, message.offset() or 0] = record

        producer.produce(topic, record.value, key=record.key, headers=list(record.headers.items()), on_delivery=arrived)
    left = producer.flush(60)
    if left or failed or not made:
        raise NotFired(f"{left + len(failed)} of {len(made)} records did not reach {topic}: {failed[:1]}")
    return delivered


def _without_letter(strike: Strike, sinks: Sequence[SinkSpec], topic: str, delivered: Delivered) -> list[str]:
    """The records of which a sink has no letter: at their place, or of an earlier record with their id."""
    by_place: dict[tuple[str, Place], str] = {}
    by_id: dict[tuple[str, bytes | None], str] = {}
    rows = strike.testbed.query(LETTERS, [topic, [one.name for one in sinks]], SinkRole.AUDITOR)
    for sink, identity, partition, offset, event_id in rows:
        by_place[sink, (partition, offset)] = identity
        if event_id is not None:
            by_id[sink, event_id.encode()] = identity
    found: list[str] = []
    for place, record in delivered.items():
        for spec in sinks:
            letter = by_place.get((spec.name, place)) or by_id.get((spec.name, record.headers.get("id")))
            if letter is not None:
                strike.letters.add(letter)
            elif asks_for(strike.testbed, spec, topic, record):
                found.append(f"{topic}-{place[0]}@{place[1]} of {spec.name}")
    return found


def asks_for(testbed: Testbed, sink: SinkSpec, topic: str, record: HostileRecord) -> bool:
    """Whether a sink asks for the event that a record claims to be. It skips others without a look at them."""
    type_ = record.headers.get("eventType")
    events = [f"{one.name}.{(type_ or b'').decode()}" for one in catalog.of_project(testbed.settings).topics[topic]]
    return type_ is None or not sink.decoders[topic].wanted_names.isdisjoint(events)


# Make them ---------------------------------------------------------------------------------------------------------


def foreign_records(_: Testbed, _topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records without our headers."""
    for _number in range(RECORDS):
        value = chance.choice([b"hello", b"[]", b"", None, chance.randbytes(50)])
        yield HostileRecord(chance.randbytes(8), {}, value)


def malformed_records(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records with our headers, whose values break the contract."""
    for _ in range(RECORDS):
        headers, event = _example(testbed, topic, chance)
        whole = json.dumps(event)
        event.pop(chance.choice(sorted(event)))
        value = chance.choice([json.dumps(event), whole[:-5], "{", "null", '{"a": NaN}'])
        yield HostileRecord(str(uuid.uuid4()).encode(), headers, value.encode())


def huge_records(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records of almost a megabyte."""
    for _ in range(3):
        headers, event = _example(testbed, topic, chance)
        yield HostileRecord(b"huge", headers, json.dumps({**event, "more": "x" * HUGE_BYTES}).encode())


def records_of_decades(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Events with ids that are older than a sink takes, or of the future."""
    now_ms = round(time.time() * 1000)
    past = (0, now_ms - testbed.settings.sink_id_age_max_days * DAY_MS - HOUR_MS)
    future = (now_ms + 2 * DAY_MS, now_ms + DECADES_MS)
    for _ in range(RECORDS):
        headers, event = _example(testbed, topic, chance)
        event_id = _uuid_v7(chance, chance.randint(*chance.choice([past, future])))
        yield HostileRecord(b"decades", {**headers, "id": event_id.encode()}, json.dumps(event).encode())


def records_with_used_ids(testbed: Testbed, topic: str, chance: random.Random) -> Iterator[HostileRecord]:
    """Records with ids of real events and a value that breaks the contract."""
    for event_id in _used_ids(testbed, topic, chance):
        headers, event = _example(testbed, topic, chance)
        value = json.dumps({**event, "version": -1}).encode()
        yield HostileRecord(b"used", {**headers, "id": event_id}, value)


def _used_ids(testbed: Testbed, topic: str, chance: random.Random) -> list[bytes]:
    """Ids of records at a random place of the topic, whether or not the outbox still has them.

    Without those that have a dead letter already, such as those of hostile records.
    """
    within: dict[int, tuple[int, int]] = {}
    for partition, (first, last) in topics.watermarks(testbed.settings, topic).items():
        begin = chance.randint(first, max(first, last - 4 * RECORDS))
        within[partition] = (begin, min(last, begin + 4 * RECORDS))
    refused = {event_id for (event_id,) in testbed.query(LETTERS_OF_ALL, [topic], SinkRole.AUDITOR)}
    found: list[bytes] = []
    for message in records.read(testbed.settings, topic, within):
        event_id = dict(message.headers() or []).get("id")
        if isinstance(event_id, bytes) and event_id.decode() not in refused:
            found.append(event_id)
    return chance.sample(found, min(RECORDS, len(found)))


def _example(testbed: Testbed, topic: str, chance: random.Random) -> tuple[Headers, dict[str, Any]]:
    """The headers of a valid event of a topic, and its payload: an example of its schema."""
    aggregates = catalog.of_project(testbed.settings).topics[topic]
    chosen = chance.choice([schema for aggregate in aggregates for schema in aggregate.schemas])
    event_id, version = _uuid_v7(chance, 1_790_000_000_000), str(chosen.version)
    headers = {"id": event_id.encode(), "eventType": chosen.type.encode(), "schemaVersion": version.encode()}
    return headers, dict(chosen.examples[0])


def _uuid_v7(chance: random.Random, time_ms: int) -> str:
    """A UUIDv7 of a time, in milliseconds since 1970."""
    number = time_ms << 80 | chance.getrandbits(80)
    number = number & ~(0xF << 76) | 0x7 << 76
    return str(uuid.UUID(int=number & ~(0x3 << 62) | 0x2 << 62))
