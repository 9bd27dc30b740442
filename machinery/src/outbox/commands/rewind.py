"""outbox rewind: reset a sink's offsets and replay."""

from __future__ import annotations

import re
from datetime import datetime

import click

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.commands import Moment
from outbox.sink.repair import rewind
from outbox.sink.repair.rewind import Moves


@click.command("rewind")
@click.argument("sink", metavar="NAME")
@click.option("--to-positions", is_flag=True, help="To the positions in its database, which replays nothing.")
@click.option("--to-earliest", is_flag=True, help="To the first event that the topic still has.")
@click.option(
    "--to-datetime",
    type=Moment(),
    metavar="TIME",
    help="To the first event that arrived then or later (ISO 8601; UTC if there is no offset).",
)
@click.option(
    "--to-offset",
    "to_offsets",
    multiple=True,
    metavar="[TOPIC/]PARTITION:OFFSET",
    help="To this offset; repeat it for several partitions.",
)
@click.option(
    "--accept-recreated",
    is_flag=True,
    help="To the first event of topics that were deleted and created again; other topics continue.",
)
@click.option("--skip-dropped", is_flag=True, help="Give up events that the topic dropped before they were applied.")
@click.option("--dry-run", is_flag=True, help="Only print what would be replayed.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def rewind_command(
    *,
    sink: str,
    to_positions: bool,
    to_earliest: bool,
    to_datetime: datetime | None,
    to_offsets: tuple[str, ...],
    accept_recreated: bool,
    skip_dropped: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Reset a sink's offsets, so that its next start replays events. Stop the sink first, and say to where.

    The strategy decides the result: `dedup` skips the events that it knows, `offsets` skips all that it has read.
    """
    settings = load()
    if sum([to_positions, to_earliest, to_datetime is not None, bool(to_offsets), accept_recreated]) != 1:
        choices = "--to-positions, --to-earliest, --to-datetime, --to-offset, --accept-recreated"
        raise click.UsageError(f"choose one of {choices}")
    if accept_recreated:
        if dry_run or skip_dropped:
            raise click.UsageError("--accept-recreated has neither --dry-run nor --skip-dropped")
        _accept_recreated(settings, sink, yes)
        return
    moves = _moves(settings, sink, to_earliest, to_datetime, to_offsets)
    if skip_dropped:
        moves = rewind.skip_dropped(settings, sink, moves)
    for place, move in moves.items():
        gives_up = move.begin > move.position
        what = (
            f"giving up {move.position} to {move.begin - 1}" if gives_up else f"replaying {move.position - move.begin}"
        )
        click.echo(f"partition {place}: from offset {move.begin}, {what}")
    again = sum(max(0, move.position - move.begin) for move in moves.values())
    if not again and not to_positions and not skip_dropped:
        raise Failure(f"sink {sink} would replay nothing", "choose an earlier offset")
    if dry_run:
        click.echo("nothing was changed (--dry-run)")
        return
    if not yes:
        click.confirm(f"Let sink {sink} begin there and replay up to {again} events?", abort=True)
    generation = rewind.rewind(settings, sink, moves)
    click.echo(f"sink {sink} begins there at its next start, with checkpoint {generation}; older ones can be deleted")


def _accept_recreated(settings: Settings, sink: str, yes: bool) -> None:
    if not yes:
        click.confirm(f"Let sink {sink} read recreated topics from their first event?", abort=True)
    accepted = rewind.accept_recreated(settings, sink)
    click.echo(f"sink {sink} begins at the first event of {', '.join(accepted)} at its next start")


def _moves(
    settings: Settings, sink: str, to_earliest: bool, to_datetime: datetime | None, to_offsets: tuple[str, ...]
) -> Moves:
    """Where each partition goes; to its position unless an option says otherwise."""
    if to_datetime is not None:
        return rewind.to_datetime(settings, sink, to_datetime)
    if to_offsets:
        return rewind.to_offsets(settings, sink, dict(map(_place, to_offsets)))
    if to_earliest:
        return rewind.to_earliest(settings, sink)
    return rewind.to_positions(settings, sink)


def _place(text: str) -> tuple[tuple[str | None, int], int]:
    found = re.fullmatch(r"(?:(.+)/)?(\d+):(\d+)", text)
    if found is None:
        raise click.BadParameter(f"{text} is not [TOPIC/]PARTITION:OFFSET", param_hint="--to-offset")
    return (found[1], int(found[2])), int(found[3])
