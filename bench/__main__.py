"""python -m bench latency | backlog | strategies | growth: each on a new, empty stack of its own."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import click

from bench import backlog as drain
from bench import latency as arrival
from bench import strategies as apply
from outbox.base import project
from outbox.base.database import connect as connect_database
from outbox.base.settings import Settings, SinkRole, load
from outbox.kafka import topics
from outbox.migrations.migrate import migrate
from outbox.relay import apply as relay
from outbox.relay import connectors
from outbox.stack.command import sink
from outbox.stack.stack import PARTS, Stack

HOME = project.current().root / ".outbox" / "bench"
WARM_UP_EVENTS = 400  # one by one; by then the JVMs have compiled the code that handles one event
BATCH_EVENTS = 100_000


@click.group()
def main() -> None:
    """Benchmarks on a stack of their own. The figures depend on the machine: compare ratios."""


@main.command()
@click.option("--events", default=300, show_default=True)
def latency(events: int) -> None:
    """Measure commit → topic and commit → balance, one event at a time, with exactly-once on.

    Reports the first events of a started chain (cold) and later ones (warm).
    """
    with _stack() as settings:
        relay.apply(settings)
        process = sink(settings, "dedup")
        process.start()
        try:
            found = {"cold": arrival.measure(settings, "dedup", WARM_UP_EVENTS)}
            found["warm"] = arrival.measure(settings, "dedup", events)
        finally:
            process.stop()
    for jvm, latencies in found.items():
        for name, seconds in asdict(latencies).items():
            p50, p99 = (round(statistics.quantiles(seconds, n=100)[cut - 1] * 1e3, 1) for cut in (50, 99))
            click.echo(json.dumps({"measure": f"commit_to_{name[:-2]}_ms", "jvm": jvm, "p50": p50, "p99": p99}))


@main.command()
@click.option("--events", default=2_000_000, show_default=True)
def backlog(events: int) -> None:
    """Drain a backlog with the dedup sink and with a hand-written consumer that runs the same SQL; report the ratio.

    Reported by halves: during the first Spark's JVM still compiles, during the second it is warm.
    """
    with _stack() as settings:
        topics.create(settings, connectors.topic_specs(settings))
        drain.produce(settings, events, report=click.echo)
        by_hand = drain.drain_by_hand(settings, "dedup", BATCH_EVENTS)
        _empty(settings)
        spark = drain.drain_with_spark(settings, "dedup", events)
    for half in drain.Rates._fields:
        ours, theirs = getattr(spark, half), getattr(by_hand, half)
        rates = {"spark_per_s": round(ours), "by_hand_per_s": round(theirs), "ratio": round(ours / theirs, 2)}
        click.echo(json.dumps({"measure": "backlog", "events": events // 2, "half": half, **rates}))


@main.command()
@click.option("--batches", default=10, show_default=True, help=f"Of {BATCH_EVENTS} events each.")
def strategies(batches: int) -> None:
    """Apply the same batches with each strategy in turn; report the rates relative to `naive`."""
    with _stack(["postgres"]) as settings:
        rates = apply.rates(settings, batches, BATCH_EVENTS)
    for name, rate in sorted(rates.items(), key=lambda entry: -entry[1]):
        ratio = round(rate / rates[apply.NAIVE.name], 2)
        click.echo(json.dumps({"measure": "strategy", "name": name, "per_s": round(rate), "ratio_to_naive": ratio}))


@main.command()
@click.option("--batches", default=100, show_default=True, help=f"Of {BATCH_EVENTS} events each.")
@click.option("--days", default=10, show_default=True, help="Spread the events over this many days.")
def growth(batches: int, days: int) -> None:
    """Compare the rate of `dedup` in the first and in the last tenth of a growing history."""
    with _stack(["postgres"]) as settings:
        found = apply.growth(settings, batches, BATCH_EVENTS, days)
    tenth = max(1, batches // 10)
    first, last = statistics.harmonic_mean(found[:tenth]), statistics.harmonic_mean(found[-tenth:])
    rates = {"first_per_s": round(first), "last_per_s": round(last), "ratio": round(last / first, 2)}
    click.echo(json.dumps({"measure": "dedup_growth", "events": batches * BATCH_EVENTS, "days": days, **rates}))


@contextmanager
def _stack(parts: Sequence[str] = PARTS) -> Iterator[Settings]:
    if HOME.exists():
        Stack(load(HOME, environment=False)).reset()
    stack = Stack(
        load(
            HOME,
            environment=False,
            stack_postgres_port=0,
            stack_kafka_port=0,
            stack_controller_port=0,
            stack_connect_port=0,
            stack_spark_port=0,
        )
    )
    try:
        stack.up(parts, report=click.echo)
        migrate(stack.settings)
        yield stack.settings
    finally:
        stack.down()


def _empty(settings: Settings) -> None:
    """Empty the tables, so that both sides start with the same."""
    connection = connect_database(settings, SinkRole.OWNER)
    try:
        with connection, connection.cursor() as cursor:
            cursor.execute("TRUNCATE processed_events, balances")
    finally:
        connection.close()


if __name__ == "__main__":
    main()
