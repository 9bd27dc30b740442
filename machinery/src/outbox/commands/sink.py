"""outbox sink: run the streaming sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from outbox.base import log, project, spans
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox.sink import discovery

if TYPE_CHECKING:
    from outbox.sink.running.supervisor import EngineOf
    from outbox.sink.spec import SinkSpec


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--until-caught-up", is_flag=True, help="End when everything that the topics have committed now is applied."
)
@click.option("--plain", is_flag=True, help="Run in this process alone, without Spark.")
def sink(names: tuple[str, ...], until_caught_up: bool, plain: bool) -> None:
    """Run the sinks of these names, or those of [tool.outbox], until SIGTERM or Ctrl-C.

    Each applies the events that it asks for to its target, side by side with the others. A sink whose failure may pass,
    such as a lost connection, starts again by itself, unless --until-caught-up is given. One that cannot run as it is
    declared is reported, and the others run.

    With --plain a sink needs no Java and little memory. Changing between both ways is a restart: the sink continues at
    its positions. A sink with a transform, or with a target that Spark writes, needs Spark.
    """
    from outbox.sink.running import supervisor

    settings = load()
    log.configure(settings, is_personal=catalog.of_project(settings).is_personal)
    wanted = names or project.current().sinks
    if not wanted:
        raise Failure("no sink is named", 'name one, or set sinks = ["…"] in [tool.outbox]')
    usable, failures = discovery.usable(settings, wanted, needs=_require_plain if plain else lambda _: None)
    for name, failure in failures.items():
        if not usable:
            raise failure
        log.get(__name__).error("sink cannot run", sink=name, error=str(failure), code=failure.code)
    with spans.exported(f"{project.current().topic_prefix}-sinks"):
        supervisor.run(settings, usable, failures, engine=_engine(plain), until_caught_up=until_caught_up)


def _require_plain(spec: SinkSpec) -> None:
    """Raises Failure `sink-needs-spark` if the sink has a transform, or a target that Spark writes."""
    if spec.job.transform is not None or spec.target.is_elsewhere:
        what = "a transform" if spec.job.transform is not None else "a target"
        raise Failure(
            f"sink {spec.name} has {what} that needs Spark", "run it without --plain", code="sink-needs-spark"
        )


def _engine(plain: bool) -> EngineOf:
    """The engine, of which the other one is not imported."""
    if plain:
        from outbox.sink.running.plain import plain_engine

        return plain_engine
    from outbox.sink.running.query import spark_engine

    return spark_engine
