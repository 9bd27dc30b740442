"""outbox up | down | status | logs | reset: the embedded stack."""

from __future__ import annotations

import json
import subprocess
import time

import click

from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox_lab.stack import internals
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
