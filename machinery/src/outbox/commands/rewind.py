"""outbox rewind: reset a sink's offsets and replay."""

from __future__ import annotations

from datetime import datetime

import click

from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.commands import Moment
from outbox.sink.repair import rewind


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
    "--accept-recreated",
    is_flag=True,
    help="To the first event of topics that were deleted and created again; other topics continue.",
)
@click.option("--skip-dropped", is_flag=True, help="Give up events that the topic dropped before they were applied.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def rewind_command(
    *,
    sink: str,
    to_positions: bool,
    to_earliest: bool,
    to_datetime: datetime | None,
    accept_recreated: bool,
    skip_dropped: bool,
    yes: bool,
) -> None:
    """Reset a sink's offsets, so that its next start replays events. Stop the sink first, and say to where.

    The command says what it would do, and asks. The strategy decides the result: `dedup` skips what it knows,
    `offsets` skips all that it has read.
    """
    settings = load()
    if sum([to_positions, to_earliest, to_datetime is not None, accept_recreated]) != 1:
        raise click.UsageError("choose one of --to-positions, --to-earliest, --to-datetime, --accept-recreated")
    if accept_recreated:
        if skip_dropped:
            raise click.UsageError("--accept-recreated does not go with --skip-dropped")
        _accept_recreated(settings, sink, yes)
        return
    if to_datetime is not None:
        moves = rewind.to_datetime(settings, sink, to_datetime)
    else:
        moves = rewind.to_earliest(settings, sink) if to_earliest else rewind.to_positions(settings, sink)
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
        raise Failure(f"sink {sink} would replay nothing", "choose an earlier time", code="nothing-to-replay")
    if not yes:
        click.confirm(f"Let sink {sink} begin there and replay up to {again} events?", abort=True)
    generation = rewind.rewind(settings, sink, moves)
    click.echo(f"sink {sink} begins there at its next start, with checkpoint {generation}; older ones can be deleted")


def _accept_recreated(settings: Settings, sink: str, yes: bool) -> None:
    if not yes:
        click.confirm(f"Let sink {sink} read recreated topics from their first event?", abort=True)
    accepted = rewind.accept_recreated(settings, sink)
    click.echo(f"sink {sink} begins at the first event of {', '.join(accepted)} at its next start")
