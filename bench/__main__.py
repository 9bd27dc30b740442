"""python -m bench write | relay | latency | start | backlog | strategies | growth: each on a new, empty stack."""

from __future__ import annotations

import json
import operator
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from bench import backlog as drain
from bench import by_hand, write
from bench import latency as arrival
from bench import relay as relaying
from bench import start as starting
from bench import strategies as apply
from bench.meter import Drain, Meter
from outbox.base import project
from outbox.base.settings import Settings, load
from outbox.kafka import topics
from outbox.migrations.migrate import migrate
from outbox.relay import apply as relay
from outbox.relay import connectors
from outbox.stack.command import sink
from outbox.stack.stack import PARTS, Stack

HOME = project.current().root / ".outbox" / "bench"
WARM_UP_EVENTS = 400  # one by one; by then the JVMs have compiled the code that handles one event
BATCH_EVENTS = 100_000
CLIENTS = (1, 4, 16)
STARTED_WITH_EVENTS = 1_000  # more than a driver decodes itself, so that executors have a part in the start


@click.group()
def main() -> None:
    """Benchmarks on a stack of their own. The figures depend on the machine: compare ratios."""


@main.command("write")
@click.option("--rounds", default=3, show_default=True, help="How often each side runs.")
@click.option("--seconds", default=5.0, show_default=True, help="How long it runs.")
def write_transaction(rounds: int, seconds: float) -> None:
    """Make transfers: by the write function, by it without its outbox, and by pgbench with the same statements."""
    with _stack(["postgres"]) as settings:
        write.make_accounts(settings)
        for workload, accounts in write.ACCOUNTS.items():
            for clients in CLIENTS:
                of = write.Load(settings, clients, accounts, seconds)
                found: dict[str, list[write.Written]] = {"function": [], "without outbox": [], "pgbench": []}
                for _ in range(rounds):
                    found["function"].append(write.function(of))
                    found["without outbox"].append(write.function(of, with_outbox=False))
                    found["pgbench"].append(write.pgbench(of))
                for name, runs in found.items():
                    per_s = statistics.median(run.per_s for run in runs)
                    _print("write", side=name, accounts=workload, clients=clients, per_s=per_s)
                for name in ("without outbox", "pgbench"):
                    _ratio(
                        f"function_to_{name}", f"per_s, {workload}, {clients} clients", found["function"], found[name]
                    )


@main.command("relay")
@click.option("--events", default=1_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True, help="How often each side relays the backlog.")
def relay_backlog(events: int, rounds: int) -> None:
    """Relay a backlog of the outbox with exactly-once on and off, in turns; nothing else runs."""
    modes = {"exactly-once": True, "at-least-once": False}
    found: dict[str, list[Drain]] = {name: [] for name in modes}
    with _stack() as settings:
        for _ in range(rounds):
            for name, on in modes.items():
                mode = settings.model_copy(update={"exactly_once": on})
                found[name].append(relaying.relay(mode, events, report=click.echo))
                _print("relay", side=name, **found[name][-1]._asdict())
    for what in ("per_s", "cpu_s_per_million"):
        _ratio("exactly_to_at_least_once", what, *found.values())


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
@click.option("--rounds", default=5, show_default=True, help="How often each side starts.")
def start(rounds: int) -> None:
    """Start the dedup sink, until its first events are applied, and a bare Spark session that counts them, in turns."""
    with _stack() as settings:
        topics.create(settings, connectors.topic_specs(settings))
        drain.produce(settings, STARTED_WITH_EVENTS, report=click.echo)
        found: dict[str, list[starting.Started]] = {"sink": [], "bare": []}
        for _ in range(rounds):
            drain.empty(settings)
            found["sink"].append(starting.of_sink(settings, "dedup"))
            found["bare"].append(starting.of_spark(settings))
            for name, starts in found.items():
                _print("start", side=name, **starts[-1]._asdict())
    for what in starting.Started._fields:
        _ratio("sink_to_bare", what, found["sink"], found["bare"])


@main.command()
@click.option("--events", type=click.IntRange(1_000_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="How often each side drains the backlog.")
@click.option("--busy-cores", default=0, show_default=True, help="Keep so many cores busy meanwhile.")
def backlog(events: int, rounds: int, busy_cores: int) -> None:
    """Drain a backlog with the dedup sink, with a consumer written by hand, and with COPY and SQL alone (the limit).

    The sides take turns. Rates and processor time are those of the second half of a drain. Ratios compare the drains of
    one round: their median, the lowest and the highest.
    """
    with _stack() as settings, tempfile.TemporaryDirectory() as folder:
        topics.create(settings, connectors.topic_specs(settings))
        drain.produce(settings, events, report=click.echo)
        files = list(by_hand.write_files(settings, Path(folder), BATCH_EVENTS))
        meter = Meter(events, Stack(settings).part("postgres"))
        sides: dict[str, Callable[[], Drain]] = {
            "spark": lambda: drain.drain_with_spark(settings, "dedup", meter),
            "by hand": lambda: drain.drain_here(meter, by_hand.drain(settings, "dedup", BATCH_EVENTS)),
            "limit": lambda: drain.drain_here(meter, by_hand.drain_files(settings, "dedup", files)),
        }
        found: dict[str, list[Drain]] = {name: [] for name in sides}
        with drain.busy(busy_cores):
            for _ in range(rounds):
                for name, side in sides.items():
                    drain.empty(settings)
                    found[name].append(side())
                    _print("drain", side=name, **found[name][-1]._asdict())
    for name in list(sides)[1:]:
        for what in ("per_s", "cpu_s_per_million"):
            _ratio(f"spark_to_{name}", what, found["spark"], found[name])


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


def _ratio(measure: str, what: str, ours: Sequence[object], theirs: Sequence[object]) -> None:
    """Print by how much one side exceeds the other, of the runs of each round."""
    of = operator.attrgetter(what.partition(",")[0])
    ratios = [of(one) / of(other) for one, other in zip(ours, theirs, strict=True)]
    _print(measure, what=what, median=statistics.median(ratios), low=min(ratios), high=max(ratios))


def _print(measure: str, **values: object) -> None:
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
    click.echo(json.dumps({"measure": measure, **rounded}))


if __name__ == "__main__":
    main()
