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


@click.command()
@click.argument("sinks", nargs=-1)
@click.option("--verbose", is_flag=True, help="Show all lines of the logs, not only warnings and errors.")
def dev(sinks: tuple[str, ...], verbose: bool) -> None:
    """Run the embedded stack, the service and the sinks in one terminal, until Ctrl-C.

    Migrations and the connector are applied first. The command restarts what you edit: the service, one sink, or all
    of them and the schema. A part that ends says why and starts again; one that ends at once three times, when you
    have changed one of its files. An error is shown with the lines of the project; `outbox logs NAME` has all of it.
    Ctrl-C stops everything; data stays.
    """
    from outbox_lab.stack.deployment import PATIENT_MS, Deployment
    from outbox_lab.stack.development import Development
    from outbox_lab.stack.stack import Stack

    # One line a record, which is shown as `outbox_lab.stack.shown` says; each sink has a port of its own.
    given = load(defaults=PATIENT_MS).replace(log_format="json", sink_metrics=None)
    names = sinks or project.current().sinks
    deployment = Deployment(Stack(given), names)
    width = max(len(name) for name in ("postgres", *(f"sink-{name}" for name in names)))
    colors: dict[str, str] = {}
    free = itertools.cycle(COLORS)

    def show(part: str, line: str) -> None:
        color = colors.setdefault(part, "white" if part == "dev" else next(free))
        click.echo(f"{click.style(f'{part:<{width}} │', fg=color, bold=part == 'dev')} {line}")

    interrupt.once()
    development = Development(deployment, names, show, verbose=verbose)
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
