"""python -m demo.external: traffic for a running chain, as in docker-compose, and the verdict.

It breaks nothing, so every sink must agree with the source.
"""

from __future__ import annotations

import random
import sys

import click
import requests
from outbox.audit import check
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.commands.check import describe

from demo.traffic import Traffic
from demo.workload import Workload

REQUESTS = 2000
SETTLE_TIMEOUT_S = 120.0


@click.command()
@click.option("--seed", type=int, help="Seed of the traffic. It is printed, so that a run can be repeated.")
def main(seed: int | None) -> None:
    """Send traffic and compare. Status 0 only if every response was expected and every sink agrees with the source."""
    settings = load()
    seed = random.randrange(10**6) if seed is None else seed
    click.echo(f"seed {seed}: {REQUESTS} requests")
    traffic = Traffic(settings, Workload(seed))
    try:
        traffic.set_up()
        traffic.run(REQUESTS)
        click.echo(", ".join(f"{count} × {kind}" for kind, count in traffic.answered.most_common()))
        report = check.check_settled(settings, SETTLE_TIMEOUT_S)
        click.echo(describe(report))
        failed = [*traffic.surprises[:1], *map(str, report.findings)]
        for name in project.current().sinks:
            report.sink(name)  # raises if it never ran
        if not 0 < traffic.events <= report.records:
            failed.append(f"the requests wrote {traffic.events} events, but the topics have {report.records}")
    except (Failure, requests.RequestException) as failure:
        failed = [str(failure)]
    if failed:
        click.echo(f"demo: expectation failed: {'; '.join(failed)}", err=True)
        sys.exit(1)
    click.echo("Every sink agrees with the source.")


if __name__ == "__main__":
    main()
