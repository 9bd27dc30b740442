"""outbox sink: run the streaming sinks."""

from __future__ import annotations

import click

from outbox.base import log, project, spans
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox.sink import discovery


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--until-caught-up", is_flag=True, help="End when everything that the topics have committed now is applied."
)
def sink(names: tuple[str, ...], until_caught_up: bool) -> None:
    """Run the sinks of these names, or those of [tool.outbox], until SIGTERM or Ctrl-C.

    Each applies the events that it asks for to its target, side by side with the others. A sink whose failure may pass,
    such as a lost connection, starts again by itself, unless --until-caught-up is given. One that cannot run as it is
    declared is reported, and the others run.
    """
    from outbox.sink.running import supervisor

    settings = load()
    log.configure(settings, is_personal=catalog.of_project(settings).is_personal)
    wanted = names or project.current().sinks
    if not wanted:
        raise Failure("no sink is named", 'name one, or set sinks = ["…"] in [tool.outbox]')
    usable, failures = discovery.usable(settings, wanted)
    for name, failure in failures.items():
        if not usable:
            raise failure
        log.get(__name__).error("sink cannot run", sink=name, error=str(failure), code=failure.code)
    with spans.exported(f"{project.current().topic_prefix}-sinks"):
        supervisor.run(settings, usable, failures, until_caught_up=until_caught_up)
