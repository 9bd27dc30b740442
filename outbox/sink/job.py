"""What a sink job declares: which topic, how its records are decoded, and the SQL that applies them; and which sinks
there are, one a strategy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink import strategy
from outbox.sink.strategy import Strategy
from outbox.sink.verdict import Judging

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MODULE = "sinks.job"  # by name: the machinery does not import the sample


@dataclass(frozen=True)
class Job:
    """``decode`` turns Kafka's records into the columns of the staged table, and leaves in a column ``record`` those
    that are not surely valid; ``judge`` says what is wrong with them. ``strategies`` is a folder, each file a sink.
    ``rebuild`` is the SQL that sets the projection's tables to what the ledger says (`outbox.sink.repair.rebuild`); without
    it, they cannot be taken from there.
    ``carries`` tells `outbox check` what to compare: each event, or the state that a key has come to.
    A column ``traceparent`` of what is decoded is not staged: the log tells of the events that have one.

    With a ``table``, the SQL that makes a Delta table, its sinks write events there: the strategy is a MERGE in Spark's
    SQL, and ``projection`` a query over the table, by key its total and version, that nothing but `outbox check` runs.
    """

    topic: str
    decode: Callable[[DataFrame], DataFrame]
    judge: Judging
    staged: Path
    strategies: Path
    projection: Path
    rebuild: Path | None = None
    carries: Literal["events", "states"] = "events"
    table: Path | None = None


class Declared(NamedTuple):
    """A sink that can be run; it has the name of its strategy."""

    job: Job
    strategy: Strategy


def load(settings: Settings) -> list[Job]:
    """The jobs of this project. It does not load Spark, as ``decode`` does so when it is called."""
    jobs: list[Job] = importlib.import_module(MODULE).jobs(settings)
    return jobs


def sinks(settings: Settings) -> dict[str, Declared]:
    """Every sink of this project, by name. Raises Failure if two jobs have a strategy of the same name."""
    found: dict[str, Declared] = {}
    for job in load(settings):
        for name, one in strategy.load(job.strategies).items():
            if name in found:
                raise Failure(f"there are two strategies called {name}", f"rename one in {job.strategies}")
            found[name] = Declared(job, one)
    return found


def choose(settings: Settings, names: Sequence[str]) -> list[Declared]:
    """The sinks of these names, each once. Raises Failure for a name that there is not."""
    known = sinks(settings)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Failure(f"no strategy is called {', '.join(unknown)}", f"there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def topic_of(settings: Settings, name: str) -> str:
    """The topic that a sink reads. One whose strategy is gone is taken for a reader of the events."""
    known = sinks(settings)
    return known[name].job.topic if name in known else settings.topic
