"""outbox rebuild: recompute a sink's result."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import click

from outbox.base import log
from outbox.base.errors import plural
from outbox.base.settings import Settings, load
from outbox.events import catalog
from outbox.kafka import topics
from outbox.kafka.topics import Topic
from outbox.sink import discovery
from outbox.sink.repair import rebuild
from outbox.sink.repair.rebuild import RebuildResult
from outbox.sink.spec import SinkSpec

WORST_SHOWN = 5
UNCHANGED = "nothing was changed (--dry-run)"


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
