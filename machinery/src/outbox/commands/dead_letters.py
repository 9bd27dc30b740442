"""outbox dead-letters list | show | replay | discard: events that a sink could not apply."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
from psycopg2 import extensions

from outbox.base.database import connected
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, load
from outbox.commands import table
from outbox.events import catalog
from outbox.events.schema import HIDDEN
from outbox.sink import discovery
from outbox.sink.remembering.dead_letters import OLDER_THAN_HORIZON
from outbox.sink.repair import replay
from outbox.sink.repair.replay import Chosen, Selection
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import Applier

SHOWN = 100  # in a table
WIDEST = 40
HEADINGS = ("sink", "identity", "status", "place", "first seen", "reason", "detail")

Command = TypeVar("Command", bound=Callable[..., Any])


def filters(command: Command) -> Command:
    """The options that choose dead letters."""
    for option in (
        click.option("--key", help="With this key."),
        click.option("--reason", help="Only those with this reason."),
        click.option("--sink", help="Only those of this sink."),
        click.argument("identities", metavar="[IDENTITY]...", nargs=-1),
    ):
        command = option(command)
    return command


everything = click.option("--all", "is_all", is_flag=True, help="All open ones, instead of a filter.")


@click.group("dead-letters")
def dead_letters() -> None:
    """Events that a sink could not apply and has set aside, so that the stream continues."""


@dead_letters.command("list")
@filters
@click.option(
    "--status",
    type=click.Choice(["open", "replayed", "discarded", "all"]),
    default="open",
    show_default=True,
    help="With this status.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all of them as JSON for a script: one object per line.")
def list_(as_json: bool, **chosen: Any) -> None:
    """List dead letters, the oldest first."""
    selection = _selection(chosen)
    with connected(load(), SinkRole.AUDITOR, "dead letters") as connection:
        letters = selection.read(connection, limit=None if as_json else SHOWN + 1)
    if as_json:
        for letter in letters:
            click.echo(json.dumps(_json(letter)))
        return
    click.echo(table(HEADINGS, [*map(_row, letters[:SHOWN])]) if letters else "no dead letters")
    if len(letters) > SHOWN:
        click.echo("… and more; --json prints all")


@dead_letters.command()
@click.argument("identity")
@click.option("--sink", help="The sink; required if several sinks have it.")
def show(identity: str, sink: str | None) -> None:
    """Print one dead letter in full, whatever its status, as JSON."""
    settings = load()
    selection = _selection({"identities": [identity], "sink": sink, "status": "all"})
    with connected(settings, SinkRole.AUDITOR, "dead letters") as connection:
        letters = selection.read(connection, in_full=True)
    if not letters:
        raise Failure(f"there is no dead letter {identity}", "`outbox dead-letters list --status all` lists them")
    if len(letters) > 1:
        sinks = ", ".join(letter["sink"] for letter in letters)
        raise Failure(f"several sinks have dead letter {identity}: {sinks}", "choose one by --sink")
    found = _json(letters[0])
    aggregates = catalog.of_project(settings).topics.get(found["topic"], ())
    if any(schema.is_personal for one in aggregates for schema in one.schemas):  # the sink database still has it
        found.pop("value_base64", None)
        found["value"] = HIDDEN
    click.echo(json.dumps(found, indent=2))


@dead_letters.command("replay")
@filters
@everything
@click.option(
    "--older-than-horizon",
    is_flag=True,
    help=f"Only dead letters with the reason '{OLDER_THAN_HORIZON}'. Use it if you are sure that none was applied.",
)
def replay_command(*, is_all: bool, older_than_horizon: bool, **chosen: Any) -> None:
    """Validate dead letters by the present contract, and apply the valid ones once. Status 1 if any stays open.

    If the projection is ordered, events that are parked behind them are replayed too. Works beside a running sink. It
    is safe to repeat: a dead letter that was replayed is no longer open. It is replayed again if the sink's table was
    restored to a version without its event.
    """
    settings = load()
    known = discovery.sinks(settings)
    if chosen["sink"] is not None:
        discovery.chosen(settings, chosen["sink"])  # raises Failure for an unknown name
    elsewhere = [name for name, spec in known.items() if spec.target.is_elsewhere]
    with _to_repair(settings, chosen, is_all, elsewhere, with_parked=True) as (connection, letters):
        done = replay.replay(
            connection,
            known,
            [letter for letter in letters if letter.sink in known],
            applier_of=lambda one: _applier(settings, one),
            older_than_horizon=older_than_horizon,
        )
    lines = [
        f"sink {sink}: replayed {one.applied + one.duplicates} ({one.applied} applied, {one.duplicates} were applied "
        f"already), {one.rejected} rejected again"
        + (f", {one.filtered} closed because the sink's transform leaves them out" if one.filtered else "")
        for sink, one in done.items()
    ]
    # Those of the copy that a rebuild makes, for example.
    unknown = sorted({letter.sink for letter in letters} - known.keys())
    lines += [f"sink {sink}: no job declares it; its dead letters stay as they are" for sink in unknown]
    click.echo("\n".join(lines) or "no dead letters to replay")
    rejected = sum(one.rejected for one in done.values())
    if rejected:
        raise Failure(
            f"{rejected} dead letters stay open",
            f"`outbox dead-letters list` says why; for '{OLDER_THAN_HORIZON}' see --older-than-horizon",
            code="dead-letters-stay-open",
        )


@dead_letters.command()
@filters
@everything
@click.option("--because", required=True, help="Why: kept with them, and shown by `outbox check`.")
def discard(is_all: bool, because: str, **chosen: Any) -> None:
    """Give up dead letters: their events are never applied, even if they come again, and `check` accepts that.

    `outbox dead-letters list` with the same options lists them.
    """
    if not because.strip():
        raise click.UsageError("--because needs a reason: the next reader will want it")
    with _to_repair(load(), chosen, is_all) as (connection, letters):
        done = replay.discard(connection, letters, because=because)
    lines = [f"sink {sink}: discarded {count}" for sink, count in done.items()]
    click.echo("\n".join(lines) or "no dead letters to discard")


def _selection(chosen: Mapping[str, Any], elsewhere: Sequence[str] = ()) -> Selection:
    identities = [identity.lower() for identity in chosen["identities"]]
    return Selection(**{**chosen, "identities": identities}, elsewhere=elsewhere)


@contextmanager
def _to_repair(
    settings: Settings,
    chosen: Mapping[str, Any],
    is_all: bool,
    elsewhere: Sequence[str] = (),
    *,
    with_parked: bool = False,
) -> Iterator[tuple[extensions.connection, list[Chosen]]]:
    """The chosen dead letters, and a connection to work on them. Wrong usage without any filter."""
    if not (is_all or any(chosen.values())):
        raise click.UsageError("Choose dead letters by an option, or use --all.")
    with connected(settings, SinkRole.WRITER, "dead letters") as connection:
        yield connection, _selection(chosen, elsewhere).choose(connection, with_parked=with_parked)


def _json(letter: dict[str, Any]) -> dict[str, Any]:
    """A dead letter as JSON: times as text, bytes as text or in base64 under a name that says so."""
    found: dict[str, Any] = {}
    for name, value in letter.items():
        if isinstance(value, memoryview):
            content = value.tobytes()
            try:
                found[name] = content.decode()
            except UnicodeDecodeError:
                found[f"{name}_base64"] = base64.b64encode(content).decode()
        else:
            found[name] = value.isoformat() if isinstance(value, datetime) else value
    return found


def _applier(settings: Settings, one: SinkSpec) -> Applier:
    if one.job.transform is None:
        return one.target.applier(settings, one)
    from outbox.sink.spark import transform  # most replays do without Spark

    return transform.applier(settings, one)


def _row(letter: dict[str, Any]) -> tuple[str, ...]:
    detail = " ".join(letter["detail"].split())
    return (
        letter["sink"],
        letter["identity"],
        letter["status"],
        f"{letter['topic']}/{letter['partition']}@{letter['offset']}",
        f"{letter['first_seen_at'].astimezone(UTC):%Y-%m-%d %H:%M:%SZ}",
        letter["reason"],
        detail if len(detail) <= WIDEST else f"{detail[: WIDEST - 1]}…",
    )
