"""Operations of people at any time: commands beside everything, rebuilds, dead letters, and retention.

Commands hold no part, so they also run while other faults break what they need. An expected failure has a code (see
`outbox_lab.soak.testbed.Done`). Any other end, such as a traceback, means that the fault has not happened.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial

from confluent_kafka import TopicPartition

from outbox.audit import declared
from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import Admin
from outbox.kafka.records import Within
from outbox.sink import discovery
from outbox.sink.remembering import fence
from outbox.sink.repair import derived
from outbox.sink.spec import SinkSpec
from outbox_lab.soak import observe
from outbox_lab.soak.domain import foreign_keys
from outbox_lab.soak.fault import NoChance, NotFired, Strike, run, wait_or_not_fired
from outbox_lab.soak.faults.sinks import wait_committed
from outbox_lab.soak.seen import WRONG_RESULT, RowChange, TopicEvent, checked
from outbox_lab.soak.testbed import SLOT_AHEAD, Done, Testbed

Place = tuple[int, int]  # partition and offset

# Commands ----------------------------------------------------------------------------------------------------------

FROM_FAULTS = {"malformed-records", "sink-parked"}  # what `outbox check` may find while other faults last
FROM_REPEATS = WRONG_RESULT  # and of sinks that do not recognise every repeat


def prune(strike: Strike) -> str:
    return f"outbox prune: {_prune(strike.testbed).end}"


def _prune(testbed: Testbed) -> Done:
    # The relay may be down, or behind.
    refusals = {"events-not-on-topic", "prune-running", "sinks-busy"}
    return run(testbed, "prune", "--keep-hours", "0", temporary=refusals)


def check(strike: Strike) -> str:
    """Run `outbox check`. Its findings must come from other faults, and must be no loss."""
    testbed = strike.testbed
    done = run(testbed, "check", "--incremental", "--json", expected={"problems-found"})
    known = discovery.sinks(testbed.settings)
    for found in checked(strike.fault.name, json.loads(done.output)).problems:
        repeats = known[found.sink].strategy.repeats if found.sink in known else "all"
        expected = FROM_FAULTS | (set() if repeats == "all" else FROM_REPEATS)
        foreign = testbed.foreign
        if found.code not in expected and not found.is_of_foreign(len(foreign), foreign_keys(foreign)):
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
    testbed, refused = strike.testbed, list[str]()
    testbed.check(f"before {strike.fault.name}")
    sinks = rebuildable(testbed, source)
    for sink in strike.chance.sample(sinks, len(sinks)):
        strike.victims = (testbed.process_of(sink).name,)  # it ends when it sees the rebuild
        # A topic that retention has shortened is incomplete.
        done = run(testbed, "rebuild", sink, "--from", source, "--yes", expected={"topic-incomplete"})
        if not done.code:
            return done.end
        refused.append(sink)
    raise NoChance(f"refused for each of {', '.join(refused)}: {done.code}")


def rebuildable(testbed: Testbed, source: str) -> list[str]:
    """The sinks that a rebuild repairs."""
    return [one.name for one in testbed.sink_specs if is_rebuildable(one, source)]


def is_rebuildable(sink: SinkSpec, source: str) -> bool:
    """Whether a rebuild computes the same result. It does not count repeats again, and makes no Delta table.

    From the source it needs SQL of each projection, which some sinks have not, such as those of captured tables.
    """
    with suppress(Failure, FileNotFoundError):
        sink.target.require_rebuildable(sink)
        if source == "source":
            derived.derived(sink)
        return sink.strategy.repeats == "all"
    return False


# Dead letters ------------------------------------------------------------------------------------------------------

DISCARDED_AT_ONCE = 100
OPEN = "SELECT count(*) FROM public.dead_letters WHERE sink = %s AND reason = %s AND status = 'open'"


def replay_letters(strike: Strike) -> str:
    done = _replay(strike.testbed, "--all")
    return f"outbox dead-letters replay --all: {done.code or done.end}"


def _replay(testbed: Testbed, *words: str) -> Done:
    """Letters of hostile records stay open."""
    return run(testbed, "dead-letters", "replay", *words, expected={"dead-letters-stay-open"})


def discard(testbed: Testbed, identities: Sequence[str]) -> None:
    """Give up the dead letters of these identities, which no valid event has."""
    for start in range(0, len(identities), DISCARDED_AT_ONCE):
        some = identities[start : start + DISCARDED_AT_ONCE]
        run(testbed, "dead-letters", "discard", *some, "--because", "a hostile record of the soak")


def refuse_events(strike: Strike) -> str:
    testbed = strike.testbed
    strike.sink = strike.chance.choice(sorted(refusing(testbed)))
    before = _count_open(strike)
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


# Retention ---------------------------------------------------------------------------------------------------------

APPLIED = """
SELECT partition, min(next_offset) FROM public.positions WHERE topic = %s AND sink = ANY(%s) GROUP BY partition
"""
OUTBOX = "SELECT id::text FROM public.outbox"
ROOM_TIMEOUT_S = 300.0


Read = Callable[[Within], Iterator[TopicEvent | RowChange]]  # the valid records of a topic within offsets


def shorten_topic(strike: Strike) -> str:
    """The topic of a captured table drops what all sinks have applied: nothing in the source could bring it again."""
    testbed, chance = strike.testbed, strike.chance
    readers = _readers(testbed)

    def with_room() -> tuple[str, dict[int, int]] | None:
        _prune(testbed)
        for topic in chance.sample(sorted(readers), len(readers)):
            if room := _room(testbed, topic, readers[topic]):
                return topic, {partition: chance.choice(ends) for partition, ends in room.items()}
        return None

    topic, ends = wait_or_not_fired("records that nobody needs", with_room, timeout_s=ROOM_TIMEOUT_S, poll_s=5)
    dropped = _drop(testbed, topic, readers[topic], ends)
    _wait_committed(testbed, topic)
    return f"{topic} has dropped {dropped} valid records, and its sinks have committed again"


def _readers(testbed: Testbed) -> Mapping[str, Read]:
    """By topic that sinks read, how to read it."""
    known = declared.load(testbed.settings)
    found: dict[str, Read] = {}
    for one in known.topics:
        found[one.name] = partial(observe.events_of, testbed.settings, known, one)
    for topic in (connector.topic for connector in testbed.captures):
        decoder = testbed.readers(topic)[0].decoders[topic]
        found[topic] = partial(observe.row_changes_of, testbed.settings, topic, decoder)
    return found


def _room(testbed: Testbed, topic: str, read: Read) -> Mapping[int, list[int]]:
    """By partition, the offsets behind the records that can be dropped."""
    sinks = [one.name for one in testbed.readers(topic)]
    applied = dict(testbed.query(APPLIED, [topic, sinks], SinkRole.AUDITOR))
    for _ in range(2):  # so that no sink reads again what is before, even if its checkpoint loses the last commit
        _wait_committed(testbed, topic)
    kept = {event_id for (event_id,) in testbed.query(OUTBOX)}
    firsts = topics.first_offsets(testbed.settings, topic)
    within = {partition: (first, applied.get(partition, first)) for partition, first in firsts.items()}
    room: dict[int, list[int]] = defaultdict(list)
    is_needed: set[int] = set()  # partitions of which the outbox has an event
    for record in sorted(read(within), key=lambda one: one.offset):
        if record.identity in kept:
            is_needed.add(record.partition)
        if record.partition not in is_needed:
            room[record.partition].append(record.offset + 1)
    return room


def _drop(testbed: Testbed, topic: str, read: Read, ends: Mapping[int, int]) -> int:
    """Drop the records before these offsets, and keep the valid ones for the checkers. Returns their number."""
    settings = testbed.settings
    firsts = topics.first_offsets(settings, topic)
    valid = list(read({partition: (firsts[partition], end) for partition, end in ends.items()}))
    testbed.dropped += valid
    admin = Admin(settings)
    places = [TopicPartition(topic, partition, end) for partition, end in ends.items()]
    for request in admin.client.delete_records(places).values():
        admin.result(request)
    left = topics.first_offsets(settings, topic)
    if any(left[partition] != end for partition, end in ends.items()) or not valid:
        raise NotFired(f"{topic} begins at {left} and not at {ends}, and has dropped {len(valid)} valid records")
    return len(valid)


def _wait_committed(testbed: Testbed, topic: str) -> None:
    """Wait until each sink of a topic has committed a batch from now on."""
    since_s = time.time()
    for sink in testbed.readers(topic):
        wait_committed(testbed, sink.name, since_s)


# Positions of sinks -----------------------------------------------------------------------------------------------

POSITIONS = "SELECT sink, partition, next_offset FROM public.positions WHERE topic = %s AND sink = ANY(%s)"


def has_passed(testbed: Testbed, sinks: Sequence[str], topic: str, places: Collection[Place]) -> bool:
    """Whether each sink has read these records of a topic."""
    positions = testbed.query(POSITIONS, [topic, list(sinks)], SinkRole.AUDITOR)
    read = {(sink, partition): next_offset for sink, partition, next_offset in positions}
    return all(read.get((sink, partition), 0) > offset for sink in sinks for partition, offset in places)
