"""What a project declares for its sinks, and which sinks there are.

Each subpackage of the project's package ``sinks`` with a module ``job`` declares a sink, or several: ``job``, a
`SinkJob`, or ``jobs``, a list of them, or a function of `Settings` that returns the list. A job is a sink: it has a
name, the events that it wants, a strategy, and any number of projections. A job that names only its events is called
like its subpackage, applies the SQL files in its folder ``projections``, and does so in the sink database. A subpackage
that is deleted is gone, and nothing else has to change.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.sink import strategy
from outbox.sink.decoder import EventDecoder, RecordDecoder
from outbox.sink.layout import Layout
from outbox.sink.strategy import Strategy

if TYPE_CHECKING:
    from outbox.sink.target import Target

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")  # the names of its staging tables must fit into 63 characters


def _sink_database() -> Target:
    from outbox.sink.postgres.target import PostgresTarget  # it is built on this module

    return PostgresTarget()


@dataclass(frozen=True)
class SinkJob:
    """A sink, as a project declares it.

    ``name`` is the subpackage's, unless it is given; paths begin at the subpackage's folder. ``events`` are names from
    the catalog (`outbox.events.catalog`): ``order`` for all events of an aggregate type, ``order.placed`` for one,
    ``order.placed.v1`` for one version. ``strategy`` is the name of a built-in strategy, or the path of a file.
    ``projections`` is a folder of SQL files (`outbox.sink.projection`). ``target`` is where the events are applied.
    Records that are no events of the catalog, such as raw CDC, have ``decoders`` by topic instead; then ``carries``
    says what `outbox check` compares: each event, or the state that a key has reached.

    ``transform`` names a function of DataFrames, as ``module:function``, that the events pass before the projections,
    or a MERGE, see them (`outbox.sink.spark.transform`). Only what needs it imports it, and PySpark with it.
    """

    name: str = ""
    projections: Path = Path("projections")
    target: Target = field(default_factory=_sink_database)
    events: Sequence[str] = ()
    strategy: str | Path = "dedup"
    decoders: Mapping[str, RecordDecoder] = field(default_factory=dict)
    carries: Literal["events", "states"] = "events"
    transform: str | None = None

    def by(self, strategy: str | Path) -> SinkJob:
        """The same job beside this one, by another strategy; it is called ``<name>-<strategy>``.

        Raises Failure if this one has no name.
        """
        if not self.name:
            raise _unusable(self, "a job beside it needs its name", 'name it: SinkJob(name="orders", …)')
        return replace(self, name=f"{self.name}-{Path(strategy).stem}", strategy=strategy)


@dataclass(frozen=True)
class SinkSpec:
    """A sink that can be run: a job with its strategy, and the decoder of each topic that it reads."""

    name: str
    job: SinkJob
    strategy: Strategy
    decoders: Mapping[str, RecordDecoder]

    @property
    def topics(self) -> list[str]:
        """The topics that it reads."""
        return sorted(self.decoders)

    @cached_property
    def layout(self) -> Layout:
        """How its events lie in its tables."""
        return layout_of(self.decoders)

    @cached_property
    def wanted(self) -> dict[str, set[str]]:
        """By topic the names of its events, with every version that it takes: what it must not have skipped."""
        return {topic: decoder.asked_for for topic, decoder in self.decoders.items()}

    @property
    def has_version(self) -> bool:
        """Whether all its events are numbered by key."""
        return all(decoder.version is not None for decoder in self.decoders.values())


def jobs(settings: Settings) -> list[SinkJob]:
    """The jobs of this project, in the order of their packages' names. It does not load Spark."""
    name = project.current().sinks_package
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise Failure(
            f"there is no package {name}", "correct `sinks-package` in [tool.outbox]", code="sinks-package-missing"
        ) from None
    found: list[SinkJob] = []
    for entry in pkgutil.iter_modules(package.__path__, f"{name}."):
        if entry.ispkg and importlib.util.find_spec(f"{entry.name}.job"):
            found += _declared(importlib.import_module(f"{entry.name}.job"), settings)
    return found


def _declared(module: ModuleType, settings: Settings) -> list[SinkJob]:
    """The jobs of a module, completed. Raises Failure if it does not declare them as it must."""
    several = getattr(module, "jobs", None)
    match getattr(module, "job", None), several(settings) if callable(several) else several:
        case SinkJob() as job, None:
            found = [job]
        case None, [*found] if all(isinstance(one, SinkJob) for one in found):
            pass
        case _:
            raise Failure(
                f"{module.__name__} must have `job`, a SinkJob, or `jobs`, a list of them, and not both",
                'write `job = SinkJob(events=["order.placed"])`; a function `jobs(settings)` may return the list',
                code="sink-undeclared",
            )
    return [_completed(job, Path(str(module.__file__)).parent) for job in found]


def _completed(job: SinkJob, folder: Path) -> SinkJob:
    """A job of the subpackage in a folder, with its name and absolute paths."""
    return replace(
        job,
        name=job.name or folder.name,
        projections=(folder / job.projections).resolve(),
        strategy=folder / job.strategy if isinstance(job.strategy, Path) else job.strategy,
        target=job.target.within(folder),
    )


def sinks(settings: Settings) -> dict[str, SinkSpec]:
    """Every sink of this project, by name.

    Raises Failure if two jobs have one name, or if a job cannot be run as it is declared.
    """
    found: dict[str, SinkSpec] = {}
    for job in jobs(settings):
        if job.name in found:
            raise Failure(f"two jobs are called {job.name}", "rename one", code="sink-ambiguous")
        found[job.name] = resolve(settings, job)
    return found


def resolve(settings: Settings, job: SinkJob) -> SinkSpec:
    """The sink of a job. Raises Failure if its name, events or strategy cannot be used."""
    if not NAME.fullmatch(job.name):
        raise _unusable(
            job, "its name is not a word", "begin with a letter; use a-z, 0-9, _ and -; at most 40 characters"
        )
    if isinstance(job.events, str):
        raise _unusable(job, f"its events are the text {job.events!r}", f"write a list: events=[{job.events!r}]")
    if bool(job.events) is bool(job.decoders):
        raise _unusable(job, "it takes no events", 'name them: events=["order.placed"]')
    if job.transform is not None and not FUNCTION.fullmatch(job.transform):
        raise _unusable(job, f"its transform is {job.transform!r}", "write it as transform='package.module:function'")
    found = strategy.find(job.strategy)
    spec = SinkSpec(job.name, job, found, job.decoders or event_decoders(settings, job.events))
    if found.needs == "version" and not spec.has_version:
        raise _unusable(
            job,
            f"strategy {found.name} needs events that are numbered by key",
            "name the version in connect/events/AGGREGATE/aggregate.toml, or choose another strategy",
        )
    return spec


def event_decoders(settings: Settings, names: Sequence[str]) -> dict[str, EventDecoder]:
    """By topic, the decoder of the events of these names. Raises Failure for an unknown name."""
    known = catalog.of(settings)
    wanted = known.wanted(names)
    return {
        topic: EventDecoder(aggregates, mine, settings.sink_id_age_max_days)
        for topic, aggregates in known.topics.items()
        if (mine := [one for one in wanted if one.schema.aggregate in {aggregate.name for aggregate in aggregates}])
    }


def layout_of(decoders: Mapping[str, RecordDecoder]) -> Layout:
    """How the events of these decoders, by topic, lie together."""
    return Layout({name: columns for topic in sorted(decoders) for name, columns in decoders[topic].types.items()})


def choose(settings: Settings, names: Sequence[str]) -> list[SinkSpec]:
    """The sinks of these names, each once. Raises Failure for an unknown name."""
    known = sinks(settings)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Failure(
            f"no sink is called {', '.join(unknown)}", f"there are {', '.join(known) or 'none'}", code="sink-unknown"
        )
    return [known[name] for name in dict.fromkeys(names)]


def chosen(settings: Settings, name: str) -> SinkSpec:
    """The sink of a name. Raises Failure for an unknown name."""
    (found,) = choose(settings, [name])
    return found


def _unusable(job: SinkJob, problem: str, remedy: str) -> Failure:
    return Failure(f"sink {job.name}: {problem}", remedy, code="sink-unusable")
