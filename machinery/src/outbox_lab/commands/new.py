"""outbox new: the files of an aggregate type, an event, a version or a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.events import catalog
from outbox_lab.events import payloads
from outbox_lab.new import properties

if TYPE_CHECKING:
    from outbox_lab.new.change import Change  # which loads the templates

TYPES = ", ".join(properties.TYPES)
STATUS = "A column for the type of the newest event, if there are several types"
Function = Callable[..., None]


def _properties(function: Function) -> Function:
    """The options that give an event properties."""
    for name, what in (("optional", "A property that an event may lack"), ("property", "A property of each event")):
        described = f"{what}, as NAME:TYPE or NAME:TYPE:personal; repeat it. Types: {TYPES}."
        function = click.option(f"--{name}", f"{name}_", multiple=True, metavar="NAME:TYPE", help=described)(function)
    return function


def _read(required: Sequence[str], optional: Sequence[str], *, is_later: bool = False) -> list[properties.Property]:
    found = [properties.read(one, may_have_blank=is_later) for one in required]
    return [*found, *(properties.read(one, is_required=False) for one in optional)]


def _names(context: click.Context, parameter: click.Parameter, texts: Sequence[str]) -> list[str]:  # noqa: ARG001
    """The names of an option that takes several, separated by commas or repeated."""
    return list(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


@click.group()
def new() -> None:
    """Write the files of an aggregate type, an event, a version or a sink: a beginning that passes `make check`.

    Nothing is overwritten: everything is written, or nothing.
    """


@new.command()
@click.argument("name")
@click.option("--key", metavar="PROPERTY[:TYPE]", help="The key. [default: NAME_id:uuid]")
@click.option("--version", default="version", show_default=True, help='It numbers the events of a key; "" for none.')
@click.option("--events", multiple=True, callback=_names, help="The types of events.  [default: created]")
@click.option("--table", help="The table of the service.  [default: NAMEs]")
@click.option("--no-table", is_flag=True, help="The service has a table: write no migration of one.")
@click.option("--status", default="status", show_default=True, help=f'{STATUS}; "" for none.')
@_properties
def aggregate(
    *,
    name: str,
    events: list[str],
    no_table: bool,
    property_: Sequence[str],
    optional_: Sequence[str],
    **options: Any,
) -> None:
    """An aggregate type with its events, and a table of the service with the view that checks read.

    \b
    outbox new aggregate order --events placed,cancelled --property cents:integer
    """
    from outbox_lab.new import schemas

    given = _read(property_, optional_)
    _write(schemas.aggregate(load(), name, given, events or ["created"], has_table=not no_table, **options))


@new.command()
@click.argument("name", metavar="AGGREGATE.TYPE")
@_properties
def event(name: str, property_: Sequence[str], optional_: Sequence[str]) -> None:
    """One more event of an aggregate type.

    \b
    outbox new event order.paid --property method:text
    """
    from outbox_lab.new import schemas

    _write(schemas.event(load(), name, _read(property_, optional_)))


@new.command()
@click.argument("name", metavar="AGGREGATE.TYPE")
@click.option("--remove", multiple=True, callback=_names, help="Properties that the new version lacks.")
@_properties
def version(name: str, remove: list[str], property_: Sequence[str], optional_: Sequence[str]) -> None:
    """The next version of an event, and the upcaster from the present one. NAME:TYPE=VALUE says what older events get.

    \b
    outbox new version order.placed --property channel:text=shop
    """
    from outbox_lab.new import schemas

    _write(schemas.version(load(), name, _read(property_, optional_, is_later=True), remove))


@new.command()
@click.argument("name")
@click.option("--events", multiple=True, required=True, callback=_names, help="Aggregate types, events, or versions.")
@click.option("--table", help="The table of the result.  [default: NAME]")
@click.option("--total", metavar="PROPERTY", help="Keep the sum of this property for each key, and not the state.")
@click.option("--history", "is_history", is_flag=True, help="Count the events of each day, and keep no state.")
@click.option("--transform", "is_transformed", is_flag=True, help="With a DataFrame function that the events pass.")
@click.option("--lakehouse", "is_lakehouse", is_flag=True, help="Keep the events in a Delta table.")
@click.option("--status", help=f'{STATUS}; "" for none.  [default: status, where the source has it]')
def sink(**options: Any) -> None:
    """A sink: its job, projection, table, comparison and test.

    It keeps the newest state of each key if it takes all events of one aggregate type, which are numbered. Otherwise it
    counts the events of each day.

    \b
    outbox new sink orders --events order
    """
    from outbox_lab.new import sinks

    given = [name.removeprefix("is_") for name in ("is_lakehouse", "total", "is_history", "table") if options[name]]
    if "lakehouse" in given[:-1] or {"total", "history"} <= {*given}:
        raise click.UsageError(f"--{given[0]} cannot be combined with --{given[1]}")
    _write(sinks.sink(load(), sinks.Wish(**options)))


def _write(made: Change) -> None:
    """Write a change, and say so. The module of typed payloads gets the new events, where the project has a folder for
    it.
    """
    from outbox_lab.new.change import shown

    made.write()
    for file in made.new:
        click.echo(f"wrote   {shown(file)}")
    for file in made.edited:
        click.echo(f"edited  {shown(file)}")
    of = project.current()
    if payloads.file(of).parent.is_dir() and any(file.is_relative_to(of.events) for file in made.new):
        catalog.load.cache_clear()
        try:
            click.echo(f"types   {shown(payloads.write(of, catalog.of_project(load())))}")
        except Failure as failure:
            click.echo(f"note: {failure}", err=True)
    if made.next_steps:
        click.echo("\n".join(["next:", *(f"  {number}. {step}" for number, step in enumerate(made.next_steps, 1))]))
