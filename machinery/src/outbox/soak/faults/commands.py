"""Commands that an operator may run at any time, beside everything."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from outbox.sink import spec
from outbox.soak.fault import Fault, NotFired
from outbox.soak.testbed import Testbed


class Operator(Fault):
    """A command, run to its end. It has happened once it ended with a status that it may end with."""

    lasts_s = (0.0, 0.0)

    def __init__(
        self, name: str, parts: Sequence[str], *words: str, statuses: Sequence[int] = (0,), links: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self._words, self._statuses, self._links = words, statuses, links

    @property
    def summary(self) -> str:
        """The command."""
        return f"`outbox {' '.join(self._words)}`, beside everything."

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        done = testbed.run(*self._words, links=self._links)
        said = (done.stdout + done.stderr).strip().splitlines()[-1:]
        if done.returncode not in self._statuses:
            raise NotFired(f"outbox {' '.join(self._words)} ended with {done.returncode}: {' '.join(said)}")
        return f"outbox {' '.join(self._words)}: {' '.join(said)}"


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
        sink = chance.choice(names)
        done = testbed.run("rebuild", sink, "--from", self._source, "--yes")
        if done.returncode != 0:
            raise NotFired(f"outbox rebuild {sink} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout.strip().splitlines()[-1]


# What each needs must run meanwhile: no fault breaks it.
ALL = ("postgres", "kafka", "connect", "connect-kafka", "debezium-postgres")
SERVERS = ("postgres", "kafka")
FAULTS: Sequence[Callable[[], Fault]] = (
    lambda: Operator("prune", ALL, "prune", "--keep-hours", "0"),
    lambda: Operator("check-incremental", SERVERS, "check", "--incremental", statuses=(0, 1)),
    lambda: Operator("connect-apply", ALL, "connect", "apply", links=["debezium-postgres"]),  # else it loses its link
    lambda: Rebuild("topic"),
    lambda: Rebuild("source"),
    lambda: Operator("replay-letters", SERVERS, "dead-letters", "replay", "--all", statuses=(0, 1)),
)
