"""The `outbox` command: its groups, what each subcommand loads, and the exit status.

A subcommand is a module of outbox/commands, or of outbox_lab/commands where that is installed. It is imported only when
it runs: `outbox status` does not load Spark.
Exit status: 0 = fine, 1 = a finding or a failure in one line on stderr, 2 = wrong usage.
"""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import click

from outbox.base import project, terminal
from outbox.base.errors import Failure
from outbox.commands import COMMANDS, Entry

LAB = "outbox_lab.commands"  # by name: no image needs it
GROUPS = ("Run", "Check", "Repair")


def commands() -> Mapping[str, Entry]:
    """By name those of production, and in front those of the lab if it is installed."""
    if find_spec(LAB.partition(".")[0]) is None:
        return COMMANDS
    in_front: Mapping[str, Entry] = import_module(LAB).COMMANDS
    return {**in_front, **COMMANDS}


class LazyGroup(click.Group):
    """A click group that imports a subcommand only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        known = commands()
        if cmd_name not in known:
            return None
        command = pkgutil.resolve_name(known[cmd_name].target)
        assert isinstance(command, click.Command)  # noqa: S101
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for group in GROUPS:
            rows = [(name, entry.summary) for name, entry in commands().items() if entry.group == group]
            with formatter.section(group):
                formatter.write_dl(rows)


def _print_version(ctx: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Print the version of the distribution that brought this package, whatever the project calls it."""
    if is_asked:
        from importlib import metadata

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
    except ModuleNotFoundError as error:
        if str(error.name).startswith("outbox"):
            raise
        remedy = "install the extra of outbox-machinery that has it: `sink` for Spark and `outbox check`"
        click.echo(f"outbox: this command needs the package of the module {error.name} — {remedy}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
