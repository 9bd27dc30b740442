"""Commands that an operator may run at any time, beside everything.

They hold no part, so they also run while other faults break what they need. An expected failure has a code (see
`outbox.soak.operator`). Any other end, such as a traceback, means that the fault has not happened.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Iterator, Sequence

from outbox.base.wait import wait_for
from outbox.sink import spec
from outbox.soak.fault import Fault, NotFired
from outbox.soak.operator import Done
from outbox.soak.testbed import Testbed

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
AGAIN_TIMEOUT_S = 300.0
FROM_RECORDS = {"malformed-records"}  # what `outbox check` may find, because of hostile records
FROM_REPEATS = {"sink-drift", "sink-parked"}  # and of sinks that do not recognise every repeat


class Operator(Fault):
    """A command, run to its end. It has happened once it has succeeded, or failed with a code that is expected here."""

    parts: tuple[str, ...] = ()
    lasts_s = (0.0, 0.0)
    expected: Collection[str] = ()
    links: Sequence[str] = ()

    def __init__(self, name: str, *words: str) -> None:
        self.name = name
        self.words = words

    @property
    def summary(self) -> str:
        """The command."""
        return f"`outbox {' '.join(self.words)}`, beside everything."

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        done = run(testbed, *self.words, expected=self.expected, links=self.links)
        self.finish(testbed, done)
        return f"outbox {' '.join(self.words)}: {done.code or done.end}"

    def finish(self, testbed: Testbed, done: Done) -> None:
        """Look at what it printed. Raises NotFired if that contradicts a promise."""


class Prune(Operator):
    """`outbox prune` of everything that may go."""

    # The relay may be down, and a transaction may be open.
    expected = ("marker-not-passed", "topic-transaction-open", "prune-running", "sinks-busy")


class Check(Operator):
    """`outbox check`. What it finds must come from other faults, and is not a loss."""

    expected = ("problems-found",)

    def finish(self, testbed: Testbed, done: Done) -> None:
        known = spec.sinks(testbed.settings)
        for found in json.loads(done.output)["findings"]:
            repeats = known[found["sink"]].strategy.repeats if found["sink"] in known else "all"
            if found["code"] not in FROM_RECORDS | (set() if repeats == "all" else FROM_REPEATS):
                raise NotFired(f"outbox {' '.join(self.words)} reports {found['code']}: {found['message']}")


class ConnectApply(Operator):
    """`outbox connect apply`. It may find a worker that is down, or a hanging transaction."""

    expected = ("connector-not-running", "connector-failed", "connect-refused")
    links = ("debezium-postgres",)  # else the connector loses its link

    def finish(self, testbed: Testbed, done: Done) -> None:
        if ": released," in done.end:
            testbed.applied("released")


class Replay(Operator):
    """`outbox dead-letters replay`. Letters of hostile records stay open."""

    expected = ("dead-letters-stay-open",)


class Rebuild(Fault):
    """`outbox rebuild` of a sink that recognises every repeat, from the topic or from the source."""

    parts = ("postgres", "kafka")
    lasts_s = (0.0, 0.0)

    def __init__(self, source: str) -> None:
        self.name = f"rebuild-from-{source}"
        self._source = source

    @property
    def summary(self) -> str:
        """The command."""
        return f"`outbox rebuild SINK --from {self._source}` of a sink that recognises every repeat, while it runs."

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        known = spec.sinks(testbed.settings)
        names = [name for name in testbed.sink_names if known[name].strategy.repeats == "all"]
        if not names:
            raise NotFired("no sink recognises every repeat")
        return run(testbed, "rebuild", chance.choice(names), "--from", self._source, "--yes").end


def run(testbed: Testbed, *words: str, expected: Collection[str] = (), links: Sequence[str] = ()) -> Done:
    """Run a command, and again while what it needs is unavailable. Raises NotFired if it ends unexpectedly."""

    def ended() -> Done | None:
        done = testbed.run(*words, links=links)
        return None if done.code in UNAVAILABLE else done

    try:
        done = wait_for(f"what `outbox {' '.join(words)}` needs", ended, timeout_s=AGAIN_TIMEOUT_S, poll_s=1)
    except TimeoutError as error:
        raise NotFired(str(error)) from error
    if done.status != 0 and done.code not in expected:
        raise NotFired(f"outbox {' '.join(words)} ended with {done.code or done.status}: {done.end}")
    return done


def discard(testbed: Testbed, identities: Sequence[str]) -> None:
    """Give up the dead letters of these identities, which no valid event has."""
    for some in _chunks(identities):
        options = [word for identity in some for word in ("--identity", identity)]
        run(testbed, "dead-letters", "discard", *options, "--because", "a hostile record of the soak")


def _chunks(values: Sequence[str], size: int = 100) -> Iterator[Sequence[str]]:
    return (values[start : start + size] for start in range(0, len(values), size))


FAULTS: Sequence[Callable[[], Fault]] = (
    lambda: Prune("prune", "prune", "--keep-hours", "0"),
    lambda: Check("check-incremental", "check", "--incremental", "--json"),
    lambda: ConnectApply("connect-apply", "connect", "apply"),
    lambda: Rebuild("topic"),
    lambda: Rebuild("source"),
    lambda: Replay("replay-letters", "dead-letters", "replay", "--all"),
)
