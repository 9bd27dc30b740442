"""outbox sink: run the streaming sinks. outbox handle: call the handlers of the project."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

import click

from outbox.base import log, project, spans
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.events import catalog
from outbox.sink import discovery

ENGINES = {
    "spark": "outbox.sink.running.query:spark_engine",
    "plain": "outbox.sink.running.plain:plain_engine",
}


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
    settings = load()
    log.configure(settings, is_personal=catalog.of_project(settings).is_personal)
    wanted = names or project.current().sinks
    if not wanted:
        raise Failure("no sink is named", 'name one, or set sinks = ["…"] in [tool.outbox]')
    run(settings, wanted, "plain" if plain else "spark", until_caught_up=until_caught_up)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--until-caught-up", is_flag=True, help="End when everything that the topics have committed now is handled."
)
def handle(names: tuple[str, ...], until_caught_up: bool) -> None:
    """Call the handlers of these names, or all of the project, until SIGTERM or Ctrl-C.

    Each event is handled once in effect: what the handler writes on its connection is committed with the event's id. An
    event that a handler fails for is set aside and tried again; `outbox dead-letters` shows it.
    """
    settings = load()
    log.configure(settings, is_personal=catalog.of_project(settings).is_personal)
    wanted = names or [one.name for one in discovery.handlers()]
    if not wanted:
        raise Failure("there is no handler", "write one: docs/handlers.md", code="handler-missing")
    run(settings, wanted, "plain", until_caught_up=until_caught_up)


def run(settings: Settings, names: Sequence[str], engine: str, *, until_caught_up: bool) -> None:
    """Run these sinks on an engine. One that cannot run as it is declared is reported, and the others run."""
    from outbox.sink.running import supervisor

    usable, failures = discovery.usable(settings, names, engine)
    for name, failure in failures.items():
        if not usable:
            raise failure
        log.get(__name__).error("sink cannot run", sink=name, error=str(failure), code=failure.code)
    try:
        engine_of = pkgutil.resolve_name(ENGINES[engine])  # the other one is not imported
    except ModuleNotFoundError as error:
        raise Failure(
            f"sinks on Spark need the package of the module {error.name}",
            "install the extra `sink` of outbox-machinery, or run them with --plain",
            code="spark-missing",
        ) from error
    with spans.exported(f"{project.current().topic_prefix}-sinks"):
        supervisor.run(settings, usable, failures, engine=engine_of, until_caught_up=until_caught_up)
