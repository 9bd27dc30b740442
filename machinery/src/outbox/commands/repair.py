"""outbox rewind and outbox rebuild: replay a sink's events, and recompute its result."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

import click

from outbox.base import log
from outbox.base.errors import Failure, plural
from outbox.base.settings import Settings, load
from outbox.events import catalog
from outbox.kafka import topics
from outbox.kafka.topics import Topic
from outbox.sink import discovery
from outbox.sink.repair import rebuild, rewind
from outbox.sink.repair.rebuild import RebuildResult
from outbox.sink.spec import SinkSpec

WORST_SHOWN = 5
UNCHANGED = "nothing was changed (--dry-run)"


def moment(text: str) -> datetime:
    """A date or a time in ISO 8601; UTC if it has no offset. Raises ValueError for another text."""
    found = datetime.fromisoformat(text)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


@click.command("rewind")
@click.argument("sink", metavar="NAME")
@click.option("--to-positions", is_flag=True, help="To the positions in its database, which replays nothing.")
@click.option("--to-earliest", is_flag=True, help="To the first event that the topic still has.")
@click.option(
    "--to-datetime",
    type=moment,
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


@click.command("rebuild")
@click.argument("sink", metavar="NAME")
@click.option(
    "--from",
    "source",
    type=click.Choice(["topic", "source"]),
    required=True,
    help="The topic, if it still has every event; or the source database.",
)
@click.option(
    "--drop-copy", is_flag=True, help="From the topic: only delete the copy that an interrupted rebuild has left."
)
@click.option(
    "--dry-run", is_flag=True, help="From the source: only print what would change. From the topic: only make the copy."
)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def rebuild_command(
    *,
    sink: str,
    source: Literal["topic", "source"],
    drop_copy: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Recompute a sink's result. The sink may run meanwhile.

    From the source: its state becomes the sink's, at once. From the topic: a copy of the sink reads all of it and
    then replaces the sink. A running driver then starts again by itself, where the copy has ended.
    """
    settings = load()
    if source == "source" and drop_copy:
        raise click.UsageError("--drop-copy is for --from topic")
    declared = discovery.chosen(settings, sink)
    declared.target.require_rebuildable(declared, source)
    if source == "source":
        _from_source(settings, declared, dry_run, yes)
    elif drop_copy:
        with rebuild.reserved(settings, sink) as connection:
            deleted = rebuild.drop_copy(connection, sink)
        click.echo(f"deleted the copy of sink {sink}" if deleted else f"there is no copy of sink {sink}")
    else:
        _from_topic(settings, declared, dry_run, yes)


def _from_source(settings: Settings, declared: SinkSpec, dry_run: bool, yes: bool) -> None:
    sink, (described, first) = declared.name, _look_up(settings, declared)
    if dry_run or not yes:
        would = rebuild.from_source(settings, declared, described, first, dry_run=True)
        _print_result(would)
        if dry_run:
            click.echo(UNCHANGED)
            return
        click.confirm(f"Set sink {sink} to the source's state?", abort=True)
    taken = rebuild.from_source(settings, declared, described, first)
    if yes:
        _print_result(taken)
    click.echo(f"sink {sink} has the source's state; events that are in flight are not counted twice")


def _from_topic(settings: Settings, declared: SinkSpec, dry_run: bool, yes: bool) -> None:
    from outbox.sink.running import supervisor
    from outbox.sink.running.query import spark_engine

    log.configure(settings, is_personal=catalog.of_project(settings).is_personal)
    sink = declared.name
    copy = replace(declared, name=rebuild.copy_of(sink))
    with rebuild.reserved(settings, sink) as connection:
        described, first = _look_up(settings, declared)
        if rebuild.begin(connection, sink, described, first):
            click.echo("resuming an interrupted rebuild; --drop-copy would delete its copy")
        # The live sink has the metrics port.
        quiet = settings.replace(sink_metrics=None)
        supervisor.run(quiet, [copy], engine=spark_engine, until_caught_up=True)
        if dry_run:
            click.echo(f"{UNCHANGED}; the copy stays: `outbox check` compares it, another run swaps it in")
            return
        if not yes:
            click.confirm(f"Replace sink {sink} by the copy?", abort=True)
        generation = rebuild.swap(connection, sink, *_look_up(settings, declared))
    click.echo(
        f"sink {sink} is replaced: a running driver starts again at its next event, with checkpoint generation "
        f"{generation}; older generations and those of {copy.name} can be deleted"
    )


def _look_up(settings: Settings, declared: SinkSpec) -> tuple[list[Topic], dict[str, dict[int, int]]]:
    """The sink's topics, and their first offsets."""
    described = [topics.describe(settings, topic) for topic in declared.topics]
    return described, {topic.name: topics.first_offsets(settings, topic.name) for topic in described}


def _print_result(result: RebuildResult) -> None:
    """Print the changes by a rebuild from the source, the largest first; events in flight are included."""
    if result.differences or not result.rows:
        total = sum(map(abs, result.differences.values()))
        click.echo(f"{len(result.differences)} keys differ, by {total} in total, events in flight included")
        for key, difference in sorted(result.differences.items(), key=lambda entry: -abs(entry[1]))[:WORST_SHOWN]:
            click.echo(f"  {key}  {difference:+}")
    for name, differences in result.rows.items():
        click.echo(f"{name}: {plural(differences.count, 'row')} to change, events in flight included")
        for one in differences.worst[:WORST_SHOWN]:
            change = {"missing": "is added: ", "surplus": "is deleted: ", "differs": ""}[one.row]
            click.echo(f"  {one.key}  {change}{'; '.join(one.lines)}")
    for (topic, partition), (first, last) in sorted(result.skipped.items()):
        click.echo(f"partition {topic}/{partition}: offsets {first} to {last} are skipped: the topic has dropped them")
