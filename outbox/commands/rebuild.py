"""outbox rebuild: recompute what a sink holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import click

from outbox.base import log
from outbox.base import settings as configuration
from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.sink import spec
from outbox.sink.repair import rebuild as rebuilding
from outbox.sink.spec import SinkSpec

WORST_SHOWN = 5
UNCHANGED = "nothing was changed (--dry-run)"


@click.command()
@click.option("--sink", required=True, metavar="NAME", help="The sink, named as its strategy.")
@click.option(
    "--from",
    "source",
    type=click.Choice(["topic", "source"]),
    required=True,
    help="The topic, if it still has every event; or the source database.",
)
@click.option("--restart", is_flag=True, help="From the topic: not on from where an earlier rebuild was cut off.")
@click.option(
    "--drop-copy", is_flag=True, help="From the topic: only delete the copy that an earlier rebuild has left."
)
@click.option("--dry-run", is_flag=True, help="Only tell what would change.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def rebuild(
    *, sink: str, source: Literal["topic", "source"], restart: bool, drop_copy: bool, dry_run: bool, yes: bool
) -> None:
    """Recompute what a sink holds. It may run meanwhile.

    From the source: its totals become the sink's, at once. From the topic: a copy of the sink reads all of it, and
    then takes the sink's place; a driver that runs is stopped by that, and is to be started again.
    """
    settings = configuration.load()
    if source == "source" and (restart or drop_copy):
        raise click.UsageError("--restart and --drop-copy are for --from topic")
    (declared,) = spec.choose(settings, [sink])
    declared.job.target.require_rebuildable(declared)
    if source == "source":
        _from_source(settings, declared, dry_run, yes)
    elif drop_copy:
        with rebuilding.reserved(settings, sink) as connection:
            deleted = rebuilding.drop_copy(connection, sink)
        click.echo(f"deleted the copy of sink {sink}" if deleted else f"there is no copy of sink {sink}")
    else:
        _from_topic(settings, declared, restart, dry_run, yes)


def _from_source(settings: Settings, declared: SinkSpec, dry_run: bool, yes: bool) -> None:
    sink, topic = declared.strategy.name, topics.describe(settings, declared.job.topic)
    first = topics.first_offsets(settings, topic.name)
    if dry_run or not yes:
        would = rebuilding.from_source(settings, declared, topic, first, dry_run=True)
        _tell(would.differences)
        _tell_skipped(would.skipped)
        if dry_run:
            click.echo(UNCHANGED)
            return
        click.confirm(f"Set sink {sink} to what the source says?", abort=True)
    taken = rebuilding.from_source(settings, declared, topic, first)
    if yes:
        _tell(taken.differences)
        _tell_skipped(taken.skipped)
    click.echo(f"sink {sink} holds what the source says; what is on its way from there is not counted twice")


def _from_topic(settings: Settings, declared: SinkSpec, restart: bool, dry_run: bool, yes: bool) -> None:
    from outbox.sink.spark import stream

    log.configure(settings)
    sink = declared.strategy.name
    copy = replace(declared.strategy, name=rebuilding.copy_of(sink))
    with rebuilding.reserved(settings, sink) as connection:
        if restart:
            rebuilding.drop_copy(connection, sink)
        topic = topics.describe(settings, declared.job.topic)
        if rebuilding.begin(connection, sink, topic, topics.first_offsets(settings, topic.name)):
            click.echo("going on where an earlier rebuild was cut off; --restart begins anew")
        # The port of the metrics is the live sink's.
        quiet = settings.model_copy(update={"sink_metrics_port": 0})
        stream.run(quiet, [SinkSpec(declared.job, copy)], until_caught_up=True)
        _tell(rebuilding.differences(connection, sink))
        if dry_run:
            click.echo(f"{UNCHANGED}; the copy stays: the command goes on with it, --drop-copy deletes it")
            return
        if not yes:
            click.confirm(f"Let the copy take the place of sink {sink}?", abort=True)
        generation = rebuilding.swap(connection, sink, topic, topics.first_offsets(settings, topic.name))
    click.echo(
        f"sink {sink} is swapped: a driver that runs ends at its next batch, the next one begins with checkpoint "
        f"{generation}; older ones and those of {copy.name} can be deleted"
    )


def _tell(differences: Mapping[str, int]) -> None:
    """What changes, the worst first; events that are not applied yet are in it too."""
    total = sum(map(abs, differences.values()))
    click.echo(f"{len(differences)} keys differ, by {total} in all, what is in flight included")
    for key, difference in sorted(differences.items(), key=lambda entry: -abs(entry[1]))[:WORST_SHOWN]:
        click.echo(f"  {key}  {difference:+d}")


def _tell_skipped(skipped: Mapping[int, tuple[int, int]]) -> None:
    for partition, (first, last) in sorted(skipped.items()):
        click.echo(f"partition {partition}: offsets {first} to {last}, which the topic has dropped, are not waited for")
