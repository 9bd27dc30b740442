"""outbox handle: call the handlers of the project."""

from __future__ import annotations

import click

from outbox.base import log
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.commands.sink import run
from outbox.events import catalog
from outbox.sink import discovery


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
