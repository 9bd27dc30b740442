"""The sinks of a project: its jobs are found, completed and made into sinks.

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
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.sink.remembering import strategy
from outbox.sink.remembering.strategy import Memory
from outbox.sink.spec import SinkJob, SinkSpec, Target, unusable

if TYPE_CHECKING:
    from outbox.sink.applying.handlers.handler import Handler
    from outbox.sink.decoding.decoder import EventDecoder

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")  # with a suffix too, it must fit into 63 characters


def jobs(settings: Settings) -> list[SinkJob]:
    """The jobs of this project, in the order of their packages' names, and its handlers. It does not load Spark."""
    return [*(job for _, job in declared(settings)), *map(job_of, handlers())]


def handlers() -> list[Handler]:
    """The handlers of this project: those that its module has, in the order of the module."""
    from outbox.sink.applying.handlers.handler import Handler

    name = project.current().handlers
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        return []
    return [one for one in vars(module).values() if isinstance(one, Handler)]


def job_of(handler: Handler) -> SinkJob:
    """The sink that calls a handler."""
    from outbox.sink.applying.handlers.target import HandlerTarget

    return SinkJob(handler.name, events=handler.events, target=HandlerTarget(handler))


def declared(settings: Settings) -> list[tuple[Path, SinkJob]]:
    """The jobs of this project, each with the folder of its module."""
    name = project.current().sinks_package
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise Failure(
            f"there is no package {name}", "correct `sinks-package` in [tool.outbox]", code="sinks-package-missing"
        ) from None
    found: list[tuple[Path, SinkJob]] = []
    for entry in pkgutil.iter_modules(package.__path__, f"{name}."):
        if entry.ispkg and importlib.util.find_spec(f"{entry.name}.job"):
            module = importlib.import_module(f"{entry.name}.job")
            folder = Path(str(module.__file__)).parent
            found += [(folder, _completed(job, folder)) for job in _declared(module, settings)]
    return found


def _declared(module: ModuleType, settings: Settings) -> list[SinkJob]:
    """The jobs of a module, as they stand there. Raises Failure if it does not declare them as it must."""
    several = getattr(module, "jobs", None)
    match getattr(module, "job", None), several(settings) if callable(several) else several:
        case SinkJob() as job, None:
            return [job]
        case None, [*found] if all(isinstance(one, SinkJob) for one in found):
            return found
        case _:
            raise Failure(
                f"{module.__name__} must have `job`, a SinkJob, or `jobs`, a list of them, and not both",
                'write `job = SinkJob(events=["order.placed"])`; a function `jobs(settings)` may return the list',
                code="sink-unusable",
            )


def _completed(job: SinkJob, folder: Path) -> SinkJob:
    """A job of the subpackage in a folder, with its name and absolute paths."""
    return replace(
        job,
        name=job.name or folder.name,
        projections=(folder / job.projections).resolve(),
        strategy=folder / job.strategy if isinstance(job.strategy, Path) else job.strategy,
        target=job.target.within(folder) if isinstance(job.target, Target) else job.target,
    )


def sinks(settings: Settings) -> dict[str, SinkSpec]:
    """Every sink of this project, by name.

    Raises Failure if two jobs have one name, or if a job cannot be run as it is declared.
    """
    return {name: resolve(settings, job) for name, job in _by_name(settings).items()}


def usable(
    settings: Settings, names: Sequence[str] = (), engine: str | None = None
) -> tuple[list[SinkSpec], dict[str, Failure]]:
    """The sinks of these names, or all, that can run as they are declared, on this engine if one is given; and by name
    why the others cannot.

    Raises Failure for an unknown name, and if two jobs have one name.
    """
    found = _by_name(settings)
    specs, failures = list[SinkSpec](), dict[str, Failure]()
    for name in _known(found, names) if names else found:
        try:
            spec = resolve(settings, found[name])
            spec.target.require_usable(spec)
            if engine is not None:
                spec.require_engine(engine)
        except Failure as failure:
            failures[name] = failure
        else:
            specs.append(spec)
    return specs, failures


def _by_name(settings: Settings) -> dict[str, SinkJob]:
    found: dict[str, SinkJob] = {}
    for job in jobs(settings):
        if job.name in found:
            raise Failure(f"two jobs are called {job.name}", "rename one", code="sink-unusable")
        found[job.name] = job
    return found


def memories(settings: Settings) -> list[Memory]:
    """The memories in the sink database of the strategies of this project's sinks and of all built-in ones."""
    strategies = [*strategy.load(strategy.BUILT_IN).values(), *(one.strategy for one in sinks(settings).values())]
    return list(dict.fromkeys(one.memory for one in strategies if one.memory is not None))


def _known(found: Collection[str], names: Sequence[str]) -> list[str]:
    """The given names, each once. Raises Failure for an unknown one."""
    unknown = [name for name in names if name not in found]
    if unknown:
        raise Failure(
            f"no sink is called {', '.join(unknown)}", f"there are {', '.join(found) or 'none'}", code="sink-unknown"
        )
    return list(dict.fromkeys(names))


def resolve(settings: Settings, job: SinkJob) -> SinkSpec:
    """The sink of a job. Raises Failure if its name, events or strategy cannot be used, or not together."""
    if not NAME.fullmatch(job.name):
        raise unusable(
            job, "its name is not a word", "begin with a letter; use a-z, 0-9, _ and -; at most 40 characters"
        )
    if isinstance(job.events, str):
        raise unusable(job, f"its events are the text {job.events!r}", f"write a list: events=[{job.events!r}]")
    if bool(job.events) is bool(job.decoders):
        raise unusable(job, "it takes no events", 'name them: events=["order.placed"]')
    for word, given in {"transform": job.transform, "target": job.target}.items():
        if not (given is None or isinstance(given, Target) or FUNCTION.fullmatch(str(given))):
            raise unusable(job, f"its {word} is {given!r}", f"write it as {word}='package.module:function'")
    found = strategy.find(job.strategy)
    decoders = job.decoders or event_decoders(settings, job.events)
    spec = SinkSpec(job.name, job, found, decoders, _target(job))
    if found.needs_version and not spec.has_version:
        raise unusable(
            job,
            f"strategy {found.name} needs events that are numbered by key",
            "name the version in connect/events/AGGREGATE/aggregate.toml, or choose another strategy",
        )
    _ = spec.layout  # raises Failure for events that have no place together
    return spec


def _target(job: SinkJob) -> Target:
    """The target of a job: by default the sink database."""
    if isinstance(job.target, Target):
        return job.target
    if job.target is None:
        from outbox.sink.applying.postgres.target import PostgresTarget

        return PostgresTarget()
    from outbox.sink.applying.function import FunctionTarget

    return FunctionTarget(job.target)


def event_decoders(settings: Settings, names: Sequence[str]) -> dict[str, EventDecoder]:
    """By topic, the decoder of the events of these names. Raises Failure for an unknown name."""
    from outbox.sink.decoding.decoder import EventDecoder

    known = catalog.of_project(settings)
    wanted = known.wanted(names)
    return {
        topic: EventDecoder(aggregates, mine, settings.sink_id_age_max_days)
        for topic, aggregates in known.topics.items()
        if (mine := [one for one in wanted if one.schema.aggregate in {aggregate.name for aggregate in aggregates}])
    }


def chosen(settings: Settings, name: str) -> SinkSpec:
    """The sink of a name. Raises Failure for an unknown name."""
    found = _by_name(settings)
    (known,) = _known(found, [name])
    return resolve(settings, found[known])
