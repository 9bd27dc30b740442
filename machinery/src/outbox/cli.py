"""The `outbox` command: its groups, what each subcommand loads, and the exit status.

A subcommand is a module of outbox/commands, imported only when it runs: `outbox status` does not load Spark.
Exit status: 0 = fine, 1 = a finding or a failure in one line on stderr, 2 = wrong usage.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import click

from outbox.base import project, terminal
from outbox.base.errors import Failure


class Entry(NamedTuple):
    group: str
    target: str  # "module:command"
    summary: str


COMMANDS = {
    "dev": Entry("Run", "outbox.commands.dev:dev", "run everything in one terminal; restart what you edit"),
    "demo": Entry(
        "Run", "outbox.commands.demo:demo", "the walkthrough: break the chain on purpose, compare every total"
    ),
    "up": Entry("Run", "outbox.commands.stack:up", "start the embedded stack, or the parts that do not run"),
    "down": Entry("Run", "outbox.commands.stack:down", "stop the embedded stack; data stays"),
    "reset": Entry("Run", "outbox.commands.stack:reset", "stop the embedded stack and delete its data"),
    "migrate": Entry("Run", "outbox.commands.migrate:migrate_command", "upgrade both databases to the newest schema"),
    "connect": Entry("Run", "outbox.commands.connect:connect", "the Debezium connector: apply, status, render, remove"),
    "serve": Entry("Run", "outbox.commands.serve:serve", "run the service under gunicorn"),
    "sink": Entry("Run", "outbox.commands.sink:sink", "run sinks: one streaming query per sink"),
    "token": Entry("Run", "outbox.commands.token:token", "print the token that clients of the service send"),
    "status": Entry("Check", "outbox.commands.stack:status", "the parts of the embedded stack"),
    "logs": Entry("Check", "outbox.commands.stack:logs", "the log of one part of the embedded stack"),
    "check": Entry(
        "Check",
        "outbox.commands.check:check_command",
        "compare source, topics and sinks: duplicates, losses, drift",
    ),
    "soak": Entry("Check", "outbox.commands.soak:soak", "break every hop at random, and judge the result"),
    "events": Entry(
        "Check", "outbox.commands.events:events", "the declared events; check examples, upcasters and edits"
    ),
    "doctor": Entry("Check", "outbox.commands.doctor:doctor", "examine every hop, and say how to fix what is wrong"),
    "monitor": Entry(
        "Check",
        "outbox.commands.monitor:monitor_command",
        "serve metrics of the slot, the connector, dead letters and drift",
    ),
    "rewind": Entry("Repair", "outbox.commands.rewind:rewind_command", "reset a sink's offsets and replay"),
    "rebuild": Entry(
        "Repair", "outbox.commands.rebuild:rebuild_command", "recompute a sink's result from the topic or the source"
    ),
    "dead-letters": Entry(
        "Repair",
        "outbox.commands.dead_letters:dead_letters",
        "events that a sink could not apply: list, show, replay, discard",
    ),
    "prune": Entry(
        "Repair", "outbox.commands.prune:prune_command", "delete relayed outbox rows and expired deduplication ids"
    ),
}
GROUPS = ("Run", "Check", "Repair")


class LazyGroup(click.Group):
    """A click group that imports a subcommand only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        try:
            command = pkgutil.resolve_name(COMMANDS[cmd_name].target)
        except ModuleNotFoundError as error:
            raise Failure(
                f"`outbox {cmd_name}` needs the package of the module {error.name}",
                "install the extra of pyproject.toml that has it, or run make install",
                code="package-missing",
            ) from error
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for group in GROUPS:
            rows = [(name, entry.summary) for name, entry in COMMANDS.items() if entry.group == group]
            with formatter.section(group):
                formatter.write_dl(rows)


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the version of the distribution that brought this package, whatever the project calls it."""
    if is_asked:
        names = metadata.packages_distributions().get("outbox", ["outbox"])
        click.echo(f"{names[0]} {metadata.version(names[0])}")
        ctx.exit()


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_print_version, help="Print the version."
)
@click.option(
    "--home",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of everything the commands write (OUTBOX_HOME).",
)
def outbox(home: Path | None) -> None:
    """A transactional outbox, end to end: service, Postgres, Debezium, Kafka, idempotent sinks."""
    if home is not None:
        os.environ["OUTBOX_HOME"] = str(home.absolute())  # for the processes that we start
    with suppress(Failure):  # help needs no project; a command that needs one says what is wrong
        project.make_importable()


def main() -> None:
    """Entry point of the console command."""
    os.umask(0o077)  # records, logs, checkpoints: what a command writes is for its user alone
    terminal.guard()
    try:
        outbox.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Failure as failure:
        click.echo(f"outbox: {failure}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
