"""outbox dev: the stack, service and sinks in one terminal."""

from __future__ import annotations

import itertools
import time

import click

from outbox.base import project
from outbox.base.settings import load
from outbox_lab.stack import interrupt

LOOK_S = 0.3  # between two looks at logs and files
COLORS = ("cyan", "magenta", "blue", "green", "yellow", "bright_cyan", "bright_magenta", "bright_blue")
WIDTH = len("postgres")


@click.command()
@click.argument("sinks", nargs=-1)
def dev(sinks: tuple[str, ...]) -> None:
    """Run the embedded stack, the service and the sinks, with their logs in one terminal, until Ctrl-C.

    Migrations and the connector are applied first. The command restarts what you edit: the service, the sinks, or
    both and the schema. A service or a sink that fails says why, and starts again when you have changed one of its
    files. A part of the stack that ends is shown with its remedy. Ctrl-C stops everything; data stays.
    """
    from outbox_lab.stack.deployment import Deployment
    from outbox_lab.stack.development import Development
    from outbox_lab.stack.stack import Stack

    deployment = Deployment(Stack(load().model_copy(update={"log_format": "text"})), sinks)
    colors: dict[str, str] = {}
    free = itertools.cycle(COLORS)

    def show(part: str, line: str) -> None:
        color = colors.setdefault(part, "white" if part == "dev" else next(free))
        click.echo(f"{click.style(f'{part:<{WIDTH}} │', fg=color, bold=part == 'dev')} {line}")

    interrupt.once()
    development = Development(deployment, show)
    try:
        development.start()
        show("dev", f"edit files of {project.current().root}; Ctrl-C ends everything")
        while True:
            development.step()
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        show("dev", "ends")
    finally:
        interrupt.never()  # half of it would keep running
        development.stop()
