"""Operations of people at any time: commands beside everything, rebuilds, and dead letters.

Commands hold no part, so they also run while other faults break what they need. An expected failure has a code (see
`outbox_lab.soak.testbed.Done`). Any other end, such as a traceback, means that the fault has not happened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from contextlib import closing, suppress

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.sink import discovery
from outbox.sink.remembering import fence
from outbox.sink.repair.rebuild import derived_tables
from outbox.sink.spec import SinkSpec
from outbox_lab.soak.fault import NotFired, Strike, run, wait_or_not_fired
from outbox_lab.soak.history import WRONG_RESULT, checked
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
    """The sinks that a rebuild repairs."""
    return [one.name for one in testbed.sink_specs if is_rebuildable(one, source)]


def is_rebuildable(sink: SinkSpec, source: str) -> bool:
    """Whether a rebuild computes the same result. It does not count repeats again, and makes no Delta table.

    From the source it needs SQL of each projection, which some sinks have not, such as those of captured tables.
    """
    with suppress(Failure):
        sink.target.require_rebuildable(sink, source)
        if source == "source":
            derived_tables(sink)
        return sink.strategy.repeats == "all"
    return False


# Dead letters ------------------------------------------------------------------------------------------------------

DISCARDED_AT_ONCE = 100
APPLIED = "SELECT name FROM public.sinks WHERE name = %s AND applied > 0"
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


# Positions of sinks -----------------------------------------------------------------------------------------------

POSITIONS = "SELECT sink, partition, next_offset FROM public.positions WHERE topic = %s AND sink = ANY(%s)"


def has_passed(testbed: Testbed, sinks: Sequence[str], topic: str, places: Collection[Place]) -> bool:
    """Whether each sink has read these records of a topic."""
    positions = testbed.query(POSITIONS, [topic, list(sinks)], SinkRole.AUDITOR)
    read = {(sink, partition): next_offset for sink, partition, next_offset in positions}
    return all(read.get((sink, partition), 0) > offset for sink in sinks for partition, offset in places)
