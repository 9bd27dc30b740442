"""outbox up | down | status | logs | reset | dev: the embedded stack, and everything on it in one terminal."""

from __future__ import annotations

import itertools
import json
import subprocess
import time

import click

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox_lab.stack import internals, interrupt
from outbox_lab.stack.postgres import MAJOR, PACKAGED
from outbox_lab.stack.process import Process
from outbox_lab.stack.stack import PARTS, Stack


def _stack() -> Stack:
    return Stack(load())


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    help="Add a Spark cluster of N workers; sinks that start later run on it. 0 ends it.",
)
@click.option(
    "--postgres",
    type=click.IntRange(min(PACKAGED), MAJOR),
    metavar="VERSION",
    help=f"Major version of Postgres, for a stack without data; {MAJOR}.",
)
def up(parts: tuple[str, ...], workers: int | None, postgres: int | None) -> None:
    """Start the embedded stack, or only the named parts. Running parts stay as they are."""
    if parts and workers is not None:
        raise click.UsageError("--workers cannot be combined with names of parts")
    stack = Stack(load(), postgres_version=postgres or MAJOR)
    has_data = stack.settings.stack_env_file.exists()
    if postgres and has_data and internals.read(stack.home).postgres_version != postgres:
        raise click.UsageError(f"the data in {stack.home} is of another version; `outbox reset` deletes it")
    started_at = time.monotonic()
    stack.up(only=parts, workers=workers, report=click.echo)
    master = load().spark_master
    if workers and master != stack.settings.spark_master:
        click.echo(f"the sinks do not run on this cluster: your settings say OUTBOX_SPARK_MASTER={master}")
    click.echo(f"the stack is up after {time.monotonic() - started_at:.1f} s; `outbox down` stops it")


@click.command()
def down() -> None:
    """Stop every process of the embedded stack. Data stays."""
    stack = _stack()
    stopped = stack.down(report=click.echo)
    click.echo(f"{stopped} parts are stopped; data stays until `outbox reset`" if stopped else "nothing was running")


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def reset(yes: bool) -> None:
    """Stop the embedded stack and delete the home folder: all data, checkpoints, Delta tables, ports and passwords."""
    stack = _stack()
    if not yes:
        click.confirm(f"Delete everything in {stack.home}?", abort=True)
    stack.reset(report=click.echo)
    click.echo(f"{stack.home} is deleted")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def status(as_json: bool) -> None:
    """Show which parts of the embedded stack run and answer. Status 1 if one does not."""
    stack = _stack()
    parts = {}
    for name in stack.parts:
        process = stack.part(name)
        pid = process.pid()
        state = "stopped" if pid is None else "ready" if process.is_ready() else "not answering"
        parts[name] = {"state": state, "pid": pid, "log": str(process.log_file)}
    if as_json:
        click.echo(json.dumps(parts, indent=2))
    else:
        for name, part in parts.items():
            click.echo(f"{name:<16} {part['state']:<14} {'pid ' + str(part['pid']) if part['pid'] else ''}".rstrip())
    missing = [name for name, part in parts.items() if part["state"] != "ready"]
    if missing:
        raise Failure(
            f"not ready: {', '.join(missing)}",
            "`outbox up` starts what is missing, `outbox logs NAME` says why it ended",
            code="stack-not-ready",
        )


@click.command()
@click.argument("name")
@click.option("-n", "--lines", default=50, show_default=True, help="Number of lines.")
@click.option("-f", "--follow", is_flag=True, help="Follow the log until Ctrl-C.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Show the last lines of the log of a part of the stack; of service, or of sink-NAME, if `outbox dev` ran them."""
    stack = _stack()
    other = Process(name, stack.home)
    part = other if other.log_file.exists() else stack.part(name)
    if not part.log_file.exists():
        raise Failure(f"{name} has no log yet", "`outbox up` starts it", code="log-missing")
    if follow:
        command = ["tail", "-n", str(lines), "-f", str(part.log_file)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as followed:
            for line in followed.stdout or ():
                click.echo(line, nl=False)
    else:
        click.echo(part.tail(lines))


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
    from outbox_lab.stack.development import Development
    from outbox_lab.stack.stack import PATIENT_MS, Deployment, Stack

    # One line a record, which is shown as `outbox_lab.stack.development` says; each sink has a port of its own.
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
