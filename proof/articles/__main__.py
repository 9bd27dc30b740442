"""Run the experiments: ``python -m proof.articles [NAME…]``. Status 1 if one was not as expected."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
from outbox.base.settings import load
from outbox.jvm import jars
from outbox_lab.stack.postgres import Postgres

from proof.articles import boundary, connection, pruning, snapshot, support, table, topic, upgrade
from proof.articles.experiment import AS_EXPECTED, Experiment, Row

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"
EXPERIMENTS = [
    *connection.EXPERIMENTS,
    *boundary.EXPERIMENTS,
    *support.EXPERIMENTS,
    *upgrade.EXPERIMENTS,
    *snapshot.EXPERIMENTS,
    *pruning.EXPERIMENTS,
    *topic.EXPERIMENTS,
]
FEWEST_EVENTS = 1_000


@click.command()
@click.argument("names", nargs=-1)
@click.option("--events", type=click.IntRange(min=FEWEST_EVENTS), help="At most so many events in each experiment.")
@click.option("--write", is_flag=True, help="Write the rows into docs/experiments.md; rows that did not run stay.")
@click.option("--list", "is_list", is_flag=True, help="List the experiments.")
def main(*, names: Sequence[str], events: int | None, write: bool, is_list: bool) -> None:
    """Run the experiments whose names contain one of these texts, or all, each on a stack of its own."""
    chosen = [one for one in EXPERIMENTS if not names or any(name in one.name for name in names)]
    if not chosen:
        raise click.UsageError(f"no experiment is called {' or '.join(names)}; --list shows all")
    if is_list:
        click.echo(table.as_text([one.planned(events) for one in chosen]))
        return
    rows = []
    for row in _results(chosen, events):
        rows.append(row)
        if write:  # at once, because the next one may be interrupted
            PAGE.write_text(table.write(PAGE.read_text(), [row], [one.name for one in EXPERIMENTS], note()))
    click.echo(table.as_text(rows))
    sys.exit(any(row.verdict != AS_EXPECTED for row in rows))


def note() -> str:
    """How the table was made, and with which versions."""
    versions = {jar.module: jar.revision for jar in jars.locked(["kafka", "plugin"])}
    server = Postgres(load(environment=False)).program("postgres")
    postgres = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    return (
        "Written by `make experiments ARGS=--write`, with Kafka and Kafka Connect "
        f"{versions['connect-runtime']}, Debezium {versions['debezium-connector-postgres']} and Postgres {postgres}."
    )


def _results(chosen: Sequence[Experiment], events: int | None) -> Iterator[Row]:
    for number, experiment in enumerate(chosen, start=1):
        began = time.monotonic()
        click.echo(f"{number} of {len(chosen)}: {experiment.name}")
        row = experiment.result(lambda line: click.echo(f"  {line}"), events)
        click.echo(f"  {row.verdict} after {time.monotonic() - began:.0f} s: {row.seen}")
        yield row


if __name__ == "__main__":
    main()
