"""Commands that an operator may run at any time, beside everything.

They hold no part, so they also run while other faults break what they need. An expected failure has a code (see
`outbox_lab.soak.operator`). Any other end, such as a traceback, means that the fault has not happened.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from contextlib import closing, suppress

from outbox.base.database import connect
from outbox.base.errors import Failure
from outbox.base.settings import SinkRole
from outbox.base.wait import wait_for
from outbox.relay.connectors import Connector
from outbox.sink import discovery
from outbox.sink.applying import projection
from outbox.sink.remembering import fence
from outbox.sink.spec import SinkSpec
from outbox_lab.soak import foreign
from outbox_lab.soak.checked import of_report
from outbox_lab.soak.checkers.checks import is_foreign
from outbox_lab.soak.fault import Fault, Make, NoChance, NotFired, wait_or_not_fired
from outbox_lab.soak.operator import Done
from outbox_lab.soak.testbed import SLOT_AHEAD, Testbed

# Nothing was done, because a server was unavailable. An operator runs the command again.
UNAVAILABLE = {
    "connect-unavailable",
    "database-busy",
    "database-connection-lost",
    "database-unavailable",
    "kafka-unavailable",
    "timeout",
    "topic-silent",
}
AGAIN_S = 1.0
AGAIN_TIMEOUT_S = 300.0
DISCARDED_AT_ONCE = 100
OPEN = "SELECT count(*) FROM public.dead_letters WHERE sink = %s AND reason = %s AND status = 'open'"
FROM_FAULTS = {"malformed-records", "sink-parked"}  # what `outbox check` may find while other faults last
FROM_REPEATS = {"sink-drift"}  # and of sinks that do not recognise every repeat


class Operator(Fault):
    """A command, run to its end. It has happened once it has succeeded, or failed with a code that is expected here."""

    parts: tuple[str, ...] = ()
    expected: Collection[str] = ()
    temporary: Collection[str] = ()
    """Codes of refusals that end by themselves: the command is run again."""

    def __init__(self, name: str, *words: str) -> None:
        self.name = name
        self.words = words

    @property
    def summary(self) -> str:
        """The command."""
        return f"`outbox {' '.join(self.words)}`, beside everything."

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        done = run(testbed, *self.words, expected=self.expected, temporary=self.temporary)
        self.finish(testbed, done)
        said = "it succeeded" if "--json" in self.words else done.end
        return f"outbox {' '.join(self.words)}: {done.code or said}"

    def finish(self, testbed: Testbed, done: Done) -> None:
        """Look at what it printed. Raises NotFired if that contradicts a promise."""


class Prune(Operator):
    """`outbox prune` of everything that may go."""

    # The relay may be down, or behind.
    temporary = ("events-not-on-topic", "prune-running", "sinks-busy")


class Check(Operator):
    """`outbox check`. What it finds must come from other faults, and is not a loss."""

    expected = ("problems-found",)

    def finish(self, testbed: Testbed, done: Done) -> None:
        known = discovery.sinks(testbed.settings)
        count, keys = len(testbed.foreign), foreign.keys(testbed.foreign)
        for found in of_report(self.name, json.loads(done.output)).problems:
            repeats = known[found.sink].strategy.repeats if found.sink in known else "all"
            expected = FROM_FAULTS | (set() if repeats == "all" else FROM_REPEATS)
            if found.code not in expected and not is_foreign(found, count, keys):
                raise NotFired(f"outbox {' '.join(self.words)} reports {found.code}: {found.message}")


class ConnectApply(Operator):
    """`outbox connect apply` of each connector. It may find a worker that is down, or a hanging transaction."""

    expected = ("connector-not-running", "connector-failed", "connect-refused")

    @property
    def summary(self) -> str:
        """The command."""
        return f"`outbox {' '.join(self.words)}` of each connector, beside everything."

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        return "; ".join(self._apply(testbed, connector) for connector in testbed.connectors)

    def _apply(self, testbed: Testbed, connector: Connector) -> str:
        words = connector.command("apply").split()[1:]
        expected, temporary = {*self.expected}, set[str]()
        if not testbed.settings.exactly_once:  # then the slot may be ahead while the connector runs
            if connector.is_outbox:
                temporary.add("slot-ahead")  # until its topics show that no event is missing
            else:
                expected |= SLOT_AHEAD  # nothing shows that for a captured table
        links = ("debezium-postgres",)  # else the connector loses its link
        done = run(testbed, *words, expected=expected, temporary=temporary, links=links)
        return f"{connector.command('apply')}: {done.code or done.end}"


class Replay(Operator):
    """`outbox dead-letters replay`. Letters of hostile records stay open."""

    expected = ("dead-letters-stay-open",)


class Rebuild(Fault):
    """`outbox rebuild` of a sink that recognises every repeat, from the topic or from the source."""

    parts = ("sinks",)  # the process of the sink ends when it sees the rebuild
    needs = ("postgres", "kafka")
    expected = ("topic-incomplete",)  # from a topic that retention has shortened

    def __init__(self, source: str) -> None:
        self.name = f"rebuild-from-{source}"
        self._source = source

    @property
    def summary(self) -> str:
        """The command."""
        return f"`outbox rebuild SINK --from {self._source}` of a sink that recognises every repeat, while it runs."

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        testbed.check(f"before {self.name}")
        sinks, refused = self._sinks(testbed), list[str]()
        for sink in chance.sample(sinks, len(sinks)):
            self.victims = (testbed.process_of(sink).name,)
            done = run(testbed, "rebuild", sink, "--from", self._source, "--yes", expected=self.expected)
            if not done.code:
                return done.end
            refused.append(sink)
        raise NoChance(f"refused for each of {', '.join(refused)}: {done.code}")

    def is_possible(self, testbed: Testbed) -> bool:
        return bool(self._sinks(testbed))

    def _sinks(self, testbed: Testbed) -> list[str]:
        return [one.name for one in testbed.sink_specs if is_rebuildable(one, self._source)]


def is_rebuildable(sink: SinkSpec, source: str) -> bool:
    """Whether a rebuild computes the same result. It does not count repeats again, and makes no Delta table.

    From the source it needs SQL of each projection, which some sinks have not, such as those of captured tables.
    """
    with suppress(Failure, FileNotFoundError):
        sink.target.require_rebuildable(sink)
        if source == "source":
            projection.rebuild_files(sink.job.projections)
        return sink.strategy.repeats == "all"
    return False


class Refused(Fault):
    """A sink refuses valid events for a while. Then their dead letters are replayed."""

    name = "letters-become-valid"
    parts = ()
    needs = ("sinks", "postgres")
    lasts_s = (2.0, 5.0)

    def __init__(self) -> None:
        self._sink = ""

    def is_possible(self, testbed: Testbed) -> bool:
        return bool(self._refusals(testbed))

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        self._sink = chance.choice(sorted(self._refusals(testbed)))
        before = self._open(testbed)
        self._change(testbed, testbed.refusals[self._sink].begin)
        count = wait_or_not_fired(
            f"{self._sink} to refuse events", lambda: self._open(testbed) - before, timeout_s=120, poll_s=0.5
        )
        return f"{self._sink} has refused {count} events"

    def heal(self, testbed: Testbed) -> None:
        """Let the sink accept events again, and replay its dead letters until none is left.

        A batch that was under way may add some after the first replay.
        """
        if not self._sink:
            return
        refusal = testbed.refusals[self._sink]
        self._change(testbed, refusal.end)

        def replayed() -> bool:
            words = ("dead-letters", "replay", "--sink", self._sink, "--reason", refusal.reason)
            run(testbed, *words, expected=Replay.expected)
            return not self._open(testbed)

        wait_for(f"the dead letters of {self._sink} to be replayed", replayed, timeout_s=120, poll_s=2)

    def _change(self, testbed: Testbed, statement: str) -> None:
        """Run a statement between two transactions of the sink."""
        with (
            closing(connect(testbed.settings, SinkRole.OWNER)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            fence.lock(cursor, self._sink)
            cursor.execute(statement)

    @staticmethod
    def _refusals(testbed: Testbed) -> set[str]:
        return testbed.refusals.keys() & set(testbed.sink_names)

    def _open(self, testbed: Testbed) -> int:
        """How many letters wait."""
        parameters = [self._sink, testbed.refusals[self._sink].reason]
        [(count,)] = testbed.query(OPEN, parameters, SinkRole.AUDITOR)
        return int(count)


def run(
    testbed: Testbed,
    *words: str,
    expected: Collection[str] = (),
    temporary: Collection[str] = (),
    links: Sequence[str] = (),
) -> Done:
    """Run a command, and again while what it needs is unavailable or it ends with a ``temporary`` code. Raises
    NotFired if it ends unexpectedly.
    """

    def ended() -> Done | None:
        done = testbed.run(*words, links=links)
        return None if done.code in {*UNAVAILABLE, *temporary} else done

    done = wait_or_not_fired(f"what `outbox {' '.join(words)}` needs", ended, timeout_s=AGAIN_TIMEOUT_S, poll_s=AGAIN_S)
    if done.status != 0 and done.code not in expected:
        raise NotFired(f"outbox {' '.join(words)} ended with {done.code or done.status}: {done.end}")
    return done


def discard(testbed: Testbed, identities: Sequence[str]) -> None:
    """Give up the dead letters of these identities, which no valid event has."""
    for start in range(0, len(identities), DISCARDED_AT_ONCE):
        some = identities[start : start + DISCARDED_AT_ONCE]
        run(testbed, "dead-letters", "discard", *some, "--because", "a hostile record of the soak")


FAULTS: list[Make] = [
    lambda: Prune("prune", "prune", "--keep-hours", "0"),
    lambda: Check("check-incremental", "check", "--incremental", "--json"),
    lambda: ConnectApply("connect-apply", "connect", "apply"),
    lambda: Rebuild("topic"),
    lambda: Rebuild("source"),
    Refused,
    lambda: Replay("replay-letters", "dead-letters", "replay", "--all"),
]
