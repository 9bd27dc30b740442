"""Sinks: the job that a project declares, the sink that is made of it, and the target that it is applied to.

They are in one module because they refer to one another: a sink has a target, whose methods take the sink.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from outbox.base import spans
from outbox.base.errors import Failure
from outbox.base.heavy import pa
from outbox.base.settings import Settings
from outbox.events.schema import shortened
from outbox.sink.remembering.strategy import Strategy

if TYPE_CHECKING:
    from psycopg2 import extensions

    from outbox.sink.decoding.batch import Chunking, Returned
    from outbox.sink.decoding.decoder import RecordDecoder
    from outbox.sink.decoding.layout import Layout
    from outbox.sink.decoding.records import Fetch
    from outbox.sink.remembering.asked import Asked
    from outbox.sink.writer import Applier, SinkWriter


@dataclass(frozen=True)
class SinkJob:
    """A sink, as a project declares it.

    ``name`` is the subpackage's, unless it is given; paths begin at the subpackage's folder. ``events`` are names from
    the catalog (`outbox.events.catalog`): ``order`` for all events of an aggregate type, ``order.placed`` for one,
    ``order.placed.v1`` for one version. ``strategy`` is the name of a built-in strategy, or the path of a file.
    ``projections`` is a folder of SQL files (`outbox.sink.applying.projection`). ``target`` is where the events are
    applied: None stands for the tables of the sink database, and ``module:function`` for a function that writes them
    (`outbox.sink.applying.function`). Records that are no events of the catalog, such as raw
    CDC, have ``decoders`` by topic instead; then ``carries`` says what `outbox check` compares: each event, or the
    state that a key has reached.

    ``transform`` names a function of DataFrames, as ``module:function``, that the events pass before the projections,
    or a MERGE, see them (`outbox.sink.spark.transform`). Only what needs it imports it, and PySpark with it.
    """

    name: str = ""
    projections: Path = Path("projections")
    target: Target | str | None = None
    events: Sequence[str] = ()
    strategy: str | Path = "dedup"
    decoders: Mapping[str, RecordDecoder] = field(default_factory=dict)
    carries: Literal["events", "states"] = "events"
    transform: str | None = None

    def by(self, strategy: str | Path) -> SinkJob:
        """A job beside this one, and like it but for the strategy; it is called ``<name>-<strategy>``.

        Raises Failure if this one has no name.
        """
        if not self.name:
            raise unusable(self, "a job beside it needs its name", 'name it: SinkJob(name="orders", …)')
        return replace(self, name=f"{self.name}-{Path(strategy).stem}", strategy=strategy)


@dataclass(frozen=True)
class SinkSpec:
    """A sink that can be run: a job with its strategy, the decoder of each topic that it reads, and its target: that of
    the job, or else the sink database.
    """

    name: str
    job: SinkJob
    strategy: Strategy
    decoders: Mapping[str, RecordDecoder]
    target: Target

    @property
    def topics(self) -> list[str]:
        """The topics that it reads."""
        return sorted(self.decoders)

    @cached_property
    def layout(self) -> Layout:
        """The columns of the sink's tables, and where each event's columns are."""
        from outbox.sink.decoding.layout import Layout

        return Layout.of_decoders(self.decoders)

    def chunking(self, topic: str) -> Chunking:
        """The chunking of the records of one of the sink's topics."""
        from outbox.sink.decoding.batch import Chunking

        as_frame = self.job.transform is not None or self.target.is_elsewhere
        decoder = self.decoders[topic]
        if spans.are_recorded():
            decoder = copy(decoder)
            decoder.finds_sampled = True
        return Chunking(decoder, self.layout, as_frame, self.strategy.remembers_ids)

    @property
    def asked(self) -> Asked:
        """The demand of the sink's job, as the sink keeps it."""
        from outbox.sink.remembering.asked import Asked

        return Asked(self.name, self.strategy.name, self.decoders)

    def require_engine(self, engine: str) -> None:
        """Raises Failure `engine-wrong` if this engine, ``spark`` or ``plain``, cannot run the sink."""
        engines = ("spark",) if self.job.transform is not None else self.target.engines
        if engine not in engines:
            remedy = "run it without --plain" if "spark" in engines else "run it by `outbox handle`"
            raise Failure(f"sink {self.name} needs {' or '.join(engines)}", remedy, code="engine-wrong")

    @property
    def is_personal(self) -> bool:
        """Whether an event that it takes has personal data."""
        return any(decoder.is_personal for decoder in self.decoders.values())

    def erase_files(self, topic: str) -> list[Path]:
        """The files NAME.erase.sql of its projections. Raises Failure if one is missing, and the topic has personal
        data.
        """
        folder = self.job.projections
        names = sorted({file.name.partition(".")[0] for file in folder.glob("*.sql")})
        files = [folder / f"{name}.erase.sql" for name in names]
        missing = [file.name for file in files if not file.exists()]
        if missing and self.decoders[topic].is_personal:
            raise Failure(
                f"sink {self.name}: its events have personal data, and {folder} has no {', '.join(missing)}",
                "write it; a file of comments says that there is nothing to erase",
                code="erase-unsupported",
            )
        return [file for file in files if file.exists()]

    @property
    def has_version(self) -> bool:
        """Whether all its events are numbered by key."""
        return all(decoder.version is not None for decoder in self.decoders.values())


class Transformed(NamedTuple):
    """A sink's transform: the columns that it returns, and for a replay what it returns of events of a topic."""

    schema: pa.Schema
    apply: Callable[[str, pa.Table], Returned]


@dataclass(frozen=True)
class TargetState:
    """The content of one version of a target outside the sink database, as `outbox check` compares it."""

    positions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # by topic and partition, the next offset
    totals: Iterable[tuple[Any, Any, Any]] = ()  # key, total and highest version, or None; a key may have several rows
    # Those of these event ids that it does not hold; None if it cannot say.
    lacking: Callable[[Collection[str]], Collection[str]] | None = None
    may_be_ahead: bool = False  # whether it may have events behind the positions, up to the version of each key
    unread: str = ""  # why nothing of this is known, if it is not


class Target(ABC):
    """The kind of place that a sink's result is kept in. Positions, dead letters and fence are always in the sink
    database.
    """

    is_elsewhere = False
    """Whether the result is outside the sink database: it may be older than the dead letters there."""
    keeps = ""
    """The places elsewhere that still have an erased key, as `outbox erase` reports them, or nothing."""
    engines: Collection[str] = ("spark", "plain")
    """What can run it: Spark, or a Python process alone."""
    records_max: int | None = None
    """How many records one transaction takes in a plain sink, if few; fewer if they take longer than a second."""
    begin: Literal["earliest", "latest"] = "earliest"
    """Where the first start begins: with the oldest records of the topics, or with those that come from then on."""
    takes_projections = True
    """Whether the job may have projections."""
    rebuilt_from: Collection[str] = ("source", "topic")
    """What `outbox rebuild` can recompute the result from."""
    not_rebuilt = ("", "")
    """Why it cannot from elsewhere, and what to do instead; ``{}`` is the sink."""
    jars: Sequence[str] = ()
    """Configurations of ivy.xml that Spark needs beside its Kafka source."""
    spark_config: Mapping[str, str] = {}
    """Settings that the Spark session needs."""

    @property
    def topics(self) -> Sequence[str]:
        """The topics that it writes to."""
        return ()

    def within(self, folder: Path) -> Target:
        """The target of a job in a folder, which relative paths begin at."""
        del folder
        return self

    @abstractmethod
    def writer(self, settings: Settings, connection: extensions.connection, spec: SinkSpec, fetch: Fetch) -> SinkWriter:
        """A writer for a running sink; it acquires the fence. ``fetch`` reads the records of dead letters.

        Raises Failure if the sink has a driver already, or if its job has changed (`outbox.sink.remembering.asked`).
        """

    @abstractmethod
    def applier(self, settings: Settings, spec: SinkSpec, transform: Transformed | None = None) -> Applier:
        """The applier of dead letters in a replay. A sink with a transform needs ``transform``."""

    def require_usable(self, spec: SinkSpec) -> None:
        """Raises Failure if the sink cannot run, as far as its files say so."""
        if not self.takes_projections and (files := sorted(spec.job.projections.glob("*.sql"))):
            remedy = "delete the file, or let `projections` name a folder without any"
            raise unusable(spec.job, f"it has a target and a projection, {files[0]}", remedy)

    def require_rebuildable(self, spec: SinkSpec, source: str) -> None:
        """Raises Failure if `outbox rebuild` cannot recompute the result from there, ``topic`` or ``source``."""
        if source not in self.rebuilt_from:
            why, remedy = self.not_rebuilt
            raise Failure(f"sink {spec.name} {why}", remedy.format(spec.name), code="rebuild-unsupported")

    def erase(self, settings: Settings, spec: SinkSpec, topic: str, key: str, *, dry_run: bool) -> Mapping[str, int]:
        """Erase a key from a target that is elsewhere, former states too. Returns how many rows, by place."""
        del settings, spec, topic, key, dry_run
        return {}

    def state(self, settings: Settings, spec: SinkSpec) -> TargetState | None:
        """The content of the target, for `outbox check`; None if that is in the sink database."""
        del settings, spec
        return None


def unusable(job: SinkJob, problem: str, remedy: str) -> Failure:
    """The Failure of a job that cannot be run as it is declared."""
    return Failure(f"sink {job.name}: {problem}", remedy, code="sink-unusable")


def function_of(job: SinkJob, word: str, name: str) -> Callable[..., Any]:
    """A function that a job names as ``module:function``; ``word`` is the job's word for it. Raises Failure if the
    function cannot be imported.
    """
    found = getattr(module_of(job, word, name), name.partition(":")[2], None)
    if not callable(found):
        raise unusable(job, f"its {word} {name} is no function", f"write it as {word}='package.module:function'")
    function: Callable[..., Any] = found
    return function


def module_of(job: SinkJob, word: str, name: str) -> ModuleType:
    """The module of such a function. Raises Failure if it cannot be imported."""
    try:
        return importlib.import_module(name.partition(":")[0])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        problem = f"its {word} {name} cannot be imported: {first_line(error)}"
        raise unusable(job, problem, f"correct the module, or {word}='package.module:function'") from error


def first_line(error: BaseException) -> str:
    """The class and the first line of an error in a project's own code."""
    try:
        said = f"{type(error).__name__}: {error}"
    except Exception:  # of its own text
        said = type(error).__name__
    return shortened(said.strip().partition("\n")[0])
