"""What a project declares for its sinks, and which sinks there are.

Each subpackage of the project's package ``sinks`` with a module ``job`` declares jobs: a function ``jobs(settings)``
that returns them. A job has one topic, one event and any number of projections; each strategy of the job makes one
sink. A subpackage that is deleted is gone, and nothing else has to change.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.sink import strategy
from outbox.sink.records import RecordDecoder
from outbox.sink.strategy import BUILT_IN, Strategy

if TYPE_CHECKING:
    from outbox.sink.target import Target


@dataclass(frozen=True)
class SinkJob:
    """One topic, how its records are decoded, and how events are applied.

    ``projections`` is a folder of SQL files (`outbox.sink.projection`). ``strategies`` are folders of strategies; a
    strategy that needs a version is left out if the events have none. ``target`` is where the events are applied.
    ``carries`` says what `outbox check` compares: each event, or the state that a key has reached.
    """

    topic: str
    decoder: RecordDecoder
    projections: Path
    target: Target
    strategies: Sequence[Path] = (BUILT_IN,)
    carries: Literal["events", "states"] = "events"

    def sinks(self) -> list[SinkSpec]:
        """Its sinks, one per strategy."""
        found = {name: one for folder in self.strategies for name, one in strategy.load(folder).items()}
        has_version = self.decoder.version is not None
        return [SinkSpec(self, one) for one in found.values() if has_version or one.needs != "version"]


class SinkSpec(NamedTuple):
    """A sink that can be run: a job by a strategy. It has the strategy's name."""

    job: SinkJob
    strategy: Strategy

    @property
    def name(self) -> str:
        """The sink's name."""
        return self.strategy.name


def jobs(settings: Settings) -> list[SinkJob]:
    """The jobs of this project, in the order of their packages' names. It does not load Spark."""
    name = project.current().sinks
    try:
        package = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise Failure(
            f"there is no package {name}", "correct `sinks` in [tool.outbox]", code="sinks-package-missing"
        ) from None
    found: list[SinkJob] = []
    for entry in pkgutil.iter_modules(package.__path__, f"{name}."):
        if entry.ispkg and any(module.name == "job" for module in pkgutil.iter_modules(_path(entry.name))):
            found += importlib.import_module(f"{entry.name}.job").jobs(settings)
    return found


def sinks(settings: Settings) -> dict[str, SinkSpec]:
    """Every sink of this project, by name. Raises Failure if two jobs have a strategy of the same name."""
    found: dict[str, SinkSpec] = {}
    for one in (sink for job in jobs(settings) for sink in job.sinks()):
        if one.name in found:
            raise Failure(f"two jobs have a strategy called {one.name}", "rename one", code="strategy-ambiguous")
        found[one.name] = one
    return found


def choose(settings: Settings, names: Sequence[str]) -> list[SinkSpec]:
    """The sinks of these names, each once. Raises Failure for an unknown name."""
    known = sinks(settings)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Failure(
            f"no strategy is called {', '.join(unknown)}", f"there are {', '.join(known)}", code="strategy-unknown"
        )
    return [known[name] for name in dict.fromkeys(names)]


def topic_of(settings: Settings, name: str) -> str:
    """The topic that a sink reads. A sink whose strategy is gone is taken for a reader of the events."""
    known = sinks(settings)
    return known[name].job.topic if name in known else settings.topic


def _path(package: str) -> list[str]:
    found = importlib.util.find_spec(package)
    return list(found.submodule_search_locations or ()) if found else []
