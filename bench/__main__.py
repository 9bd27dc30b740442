"""python -m bench COMMAND: each on a new, empty stack. `python -m bench --help` lists the commands."""

from __future__ import annotations

import json
import operator
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import click
from outbox.base import project
from outbox.base.settings import FIELDS, Settings, SinkRole, load, password_setting
from outbox.kafka import topics
from outbox.migrations.migrate import MINIMUM, migrate
from outbox.relay import connectors, lifecycle
from outbox_lab.stack import interrupt
from outbox_lab.stack.command import SinkProcess, sink
from outbox_lab.stack.postgres import MAJOR
from outbox_lab.stack.stack import PARTS, Stack
from outbox_lab.testing.fixtures.stack import private_stack

from bench import (
    append,
    backlog,
    by_hand,
    by_the_book,
    check,
    clients,
    cluster,
    handle,
    idle,
    jdbc,
    kinds,
    latency,
    merge_by_hand,
    peers,
    relay,
    row_by_row,
    sizes,
    spans,
    start,
    strategies,
    warehouse,
    write,
)
from bench.meter import Drain, Meter

R = TypeVar("R", bound=NamedTuple)
F = TypeVar("F", bound=Callable[..., object])
HOME = project.current().root / ".outbox" / "bench"
OLDER_HOME = HOME.with_name("bench-older")
WARM_UP_S = 30.0
BATCH_EVENTS = 100_000
CLIENTS = (1, 4, 16)
LATENCY_SIDES = ("ours", "plain", "transform", "defaults")
BACKLOG_SIDES = ("spark", "plain", "plain on one core", "by hand", "limit")
SINK = "balances"
SINK_DATABASE = ("sink_db_url", *map(password_setting, SinkRole))  # what differs between the servers of two stacks
IDLE_SINKS = ("balances", "accounts")
STARTED_WITH_EVENTS = 1_000  # more than a driver decodes itself, so that executors have a part in the start


def _with(option: str, setting: str) -> Callable[[F], F]:
    """An option for a setting of the stack."""
    field, kind = FIELDS[setting], click.IntRange(1)
    return click.option(
        option, setting, type=kind, default=field.default, show_default=True, help=get_args(field.type)[-1]
    )


@click.group()
def main() -> None:
    """Benchmarks on a stack of their own. The figures depend on the machine: compare ratios."""


@main.command("write")
@click.option("--rounds", default=3, show_default=True, help="How often each side runs.")
@click.option("--seconds", default=3.0, show_default=True, help="How long it runs.")
def write_transaction(rounds: int, seconds: float) -> None:
    """Make transfers by the write function, over HTTP, with a dual write, and by pgbench with the same statements.

    Also by the function and over HTTP without the outbox: the difference is its cost.
    """
    with _stack(["postgres", "kafka"]) as settings:
        topics.create(settings, connectors.topic_specs(settings))
        write.make_accounts(settings)
        for workload, accounts in write.ACCOUNTS.items():
            for number in CLIENTS:
                _write(clients.Load(settings, number, accounts, seconds), workload, rounds)


def _write(load: clients.Load, workload: str, rounds: int) -> None:
    def served(app: str) -> write.Written:
        with clients.served(load.settings, app):
            return write.measure(load, clients.over_http)

    sides: dict[str, Callable[[], write.Written]] = {
        "function": lambda: write.measure(load, clients.function),
        "function without outbox": lambda: write.measure(load, clients.without_outbox),
        "dual write": lambda: write.measure(load, clients.dual_write),
        "pgbench": lambda: write.pgbench(load),
        "http": lambda: served("service.app:create_app()"),
        "http without outbox": lambda: served("bench.clients:create_app_without_outbox()"),
    }
    found = _in_turns(sides, rounds)
    what = {"accounts": workload, "clients": load.clients}
    for name, runs in found.items():
        database_cpu_s = statistics.median(run.database_cpu_s_per_1000 for run in runs)
        per_s = statistics.median(run.per_s for run in runs)
        _print("write", side=name, **what, per_s=per_s, database_cpu_s_per_1000=database_cpu_s)
    for one, other in (
        ("function", "function without outbox"),
        ("http", "http without outbox"),
        ("function", "dual write"),
        ("function", "pgbench"),
    ):
        _ratio(f"{one} to {other}", "per_s", found[one], found[other], **what)


@main.command("append")
@click.option("--rounds", default=10, show_default=True, help="How often both sides are compared.")
@click.option("--transfers", default=500, show_default=True, help="How many each side makes in a round.")
def append_events(rounds: int, transfers: int) -> None:
    """Make transfers whose events `append` validates, and transfers whose events it does not, in turns."""
    with _stack(["postgres"]) as settings:
        write.make_accounts(settings)
        with clients.function(clients.Load(settings, 1, write.ACCOUNTS["uniform"], 0)) as make:
            append.measure(make, transfers)  # the first transactions of a connection are slow
            compared = [append.measure(make, transfers) for _ in range(rounds)]
    found = {"validated": [one[True] for one in compared], "not validated": [one[False] for one in compared]}
    for side, runs in found.items():
        _print("append", side=side, **append.median(runs)._asdict())
    _ratios(found, *append.Transfers._fields)


@main.command("drivers")
@click.option("--rounds", default=100, show_default=True, help="How often both sides run.")
@click.option("--transactions", default=40, show_default=True, help="How many each side makes in a round.")
def append_by_drivers(rounds: int, transactions: int) -> None:
    """Append one event a transaction by asyncpg and by psycopg2, in turns."""
    with (
        _stack(["postgres"]) as settings,
        append.asyncpg(settings) as by_asyncpg,
        append.psycopg2(settings) as by_psycopg2,
    ):
        sides = {"asyncpg": partial(by_asyncpg, transactions), "psycopg2": partial(by_psycopg2, transactions)}
        _in_turns(sides, 1)  # the first transactions of a connection are slow
        found = _in_turns(sides, rounds)
    for side, runs in found.items():
        _print("drivers", side=side, **append.median(runs)._asdict())
    _ratios(found, *append.Transfers._fields)


@main.command("relay")
@click.option("--events", default=1_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True, help="How often each side relays the backlog.")
def relay_backlog(events: int, rounds: int) -> None:
    """Relay a backlog of the outbox with exactly-once on and off, with the defaults of Debezium and Connect, which have
    it off, and by polling, in turns; nothing else runs.
    """
    with _stack() as settings:
        at_least_once = settings.replace(exactly_once=False)
        ours, without = connectors.load(settings), connectors.load(at_least_once)
        defaults = relay.with_defaults(without)
        sides: dict[str, Callable[[], Drain]] = {
            "exactly-once": lambda: relay.relay(settings, ours, events, report=click.echo),
            "at-least-once": lambda: relay.relay(at_least_once, without, events, report=click.echo),
            "defaults": lambda: relay.relay(at_least_once, defaults, events, click.echo, relay.DefaultWorker),
            "polling": lambda: relay.poll(settings, events),
        }
        found = _in_turns(sides, rounds, "relay")
    _ratios(found, "per_s", "cpu_s_per_million")


@main.command("latency")
@click.option("--events", default=200, show_default=True, help="How many are written one at a time.")
@click.option("--per-s", default=100.0, show_default=True, help="The steady rate.")
@click.option("--seconds", default=30.0, show_default=True, help="How long it lasts.")
@click.option("--rounds", default=1, show_default=True, help="How often each side is measured.")
@click.option("--side", "chosen", multiple=True, type=click.Choice(LATENCY_SIDES), help="Only this one, or these.")
@_with("--poll-interval-ms", "connector_poll_interval_ms")
def measure_latency(
    events: int, per_s: float, seconds: float, rounds: int, chosen: Sequence[str], **waits_ms: int
) -> None:
    """Measure commit → topic and commit → balance, with and without a transform, and beside the defaults of Debezium
    and Spark.

    Exactly-once is on. Each side first gets half a minute of events, so that its JVMs have compiled what they run.
    """
    found: dict[tuple[str, str, str], list[float]] = {}
    with _stack(**waits_ms) as settings:
        ours = connectors.load(settings)
        sides: dict[str, tuple[connectors.Connector, latency.Sink]] = {
            "ours": (ours, latency.Sink(sink(settings, SINK), SINK)),
            "plain": (ours, latency.Sink(sink(settings, SINK, plain=True), SINK)),
            "transform": (ours, latency.Sink(sink(settings, "turnover"), "turnover", "turnover")),
            "defaults": (relay.with_defaults(ours), latency.Sink(peers.ByTheBook(settings), by_the_book.NAME)),
        }
        lifecycle.apply(settings)
        relay.write(settings, relay.EVENTS_OF_A_TRANSACTION)  # the peer is ready once it has applied something
        loads: dict[str, Callable[[latency.Sink], latency.Latencies]] = {
            "one at a time": lambda of: latency.one_by_one(settings, of, events),
            f"{per_s:g} per s": lambda of: latency.at_rate(settings, of, per_s, seconds),
        }
        sides = {side: sides[side] for side in chosen or LATENCY_SIDES}
        for number, (side, (one, of)) in enumerate([*sides.items()] * rounds):
            of_rounds = f"round {number // len(sides) + 1} of {rounds}"
            _progress(f"{side}, {of_rounds}: starts, and gets events for {WARM_UP_S:g} s before it is measured")
            lifecycle.apply(settings, one)
            of.process.start()
            try:
                latency.at_rate(settings, of, per_s, WARM_UP_S)
                for load, measured in loads.items():
                    _progress(f"{side}, {load}")
                    for to, values in asdict(measured(of)).items():
                        measure = f"commit to {to.removesuffix('_s')}"
                        found.setdefault((measure, load, side), []).extend(values)
                        _print_quantiles(measure, load, side, values)
            finally:
                of.process.stop()
    if rounds > 1:
        for (measure, load, side), values in found.items():
            _print_quantiles(f"{measure}, all rounds", load, side, values)


@main.command("idle")
@click.option("--seconds", default=30.0, show_default=True, help="How long each side is measured.")
@click.option("--rounds", default=2, show_default=True, help="How often each side is measured.")
@click.option("--interval-ms", default=1000, show_default=True, help="Of the triggers of the second side.")
@_with("--poll-interval-ms", "connector_poll_interval_ms")
def measure_idle(seconds: float, rounds: int, interval_ms: int, **waits_ms: int) -> None:
    """Measure what the chain costs while no event is written: two sinks whose batches begin at once, and two with an
    interval between their batches.
    """
    with _stack(**waits_ms) as settings:
        lifecycle.apply(settings)
        sides: dict[str, Callable[[], idle.Idle]] = {
            f"{every} ms": partial(idle.measure, settings, IDLE_SINKS, every, seconds) for every in (0, interval_ms)
        }
        _in_turns(sides, rounds, "idle")


@main.command("start")
@click.option("--rounds", default=5, show_default=True, help="How often each side starts.")
def measure_start(rounds: int) -> None:
    """Start a sink, on Spark and plain, until its first events are applied, and a bare Spark session that counts them,
    in turns.
    """
    with _stack() as settings:
        backlog.produce(settings, STARTED_WITH_EVENTS, report=click.echo)
        sides: dict[str, Callable[[], start.Started]] = {
            "sink": lambda: start.of_sink(settings, SINK),
            "plain": lambda: start.of_sink(settings, SINK, plain=True),
            "bare": lambda: start.of_spark(settings),
        }
        found = _in_turns(sides, rounds, "start", before=lambda: backlog.empty(settings))
    _ratios(found, *start.Started._fields)


@main.command("backlog")
@click.option("--events", type=click.IntRange(1_000_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="How often each side drains the backlog.")
@click.option("--busy-cores", default=0, show_default=True, help="Keep so many cores busy meanwhile.")
@click.option("--side", "chosen", multiple=True, type=click.Choice(BACKLOG_SIDES), help="Only this one, or these.")
def drain_backlog(events: int, rounds: int, busy_cores: int, chosen: Sequence[str]) -> None:
    """Drain a backlog with the sink on Spark, plain, and plain with all its threads on one core, with a consumer
    written by hand, and with COPY and SQL alone (the limit).

    The sides take turns. Rates and processor time are those of the second half of a drain. Ratios compare the drains of
    one round: their median, the lowest and the highest.
    """
    with _stack() as settings, tempfile.TemporaryDirectory() as folder:
        backlog.produce(settings, events, report=click.echo)
        needs_files = "limit" in (chosen or BACKLOG_SIDES)
        files = list(by_hand.write_files(settings, Path(folder), BATCH_EVENTS)) if needs_files else []
        meter = Meter(events, Stack(settings).part("postgres"))
        plain = sink(settings, SINK, plain=True)
        sides: dict[str, Callable[[], Drain]] = {
            "spark": partial(_drain, settings, meter),
            "plain": lambda: backlog.drain_with(plain, backlog.applied(settings, SINK), meter),
            "plain on one core": lambda: backlog.drain_on_one_core(plain, backlog.applied(settings, SINK), meter),
            "by hand": lambda: backlog.drain_here(meter, by_hand.drain(settings, SINK, BATCH_EVENTS)),
            "limit": lambda: backlog.drain_here(meter, by_hand.drain_files(settings, SINK, files)),
        }
        with backlog.busy(busy_cores):
            sides = {side: sides[side] for side in chosen or BACKLOG_SIDES}
            found = _in_turns(sides, rounds, "drain", before=lambda: backlog.empty(settings))
    _ratios(found, "per_s", "cpu_s_per_million", "database_cpu_s_per_million")


@main.command("postgres")
@click.option("--version", type=click.IntRange(MINIMUM, MAJOR - 1), default=MINIMUM, show_default=True)
@click.option("--events", type=click.IntRange(1_000_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="How often each side drains the backlog.")
def drain_on_versions(version: int, events: int, rounds: int) -> None:
    """Drain a backlog into a sink database on an older Postgres, and on the newest one, in turns."""
    with _stack() as newest, _stack(["postgres"], OLDER_HOME, postgres_version=version) as older:
        backlog.produce(newest, events, report=click.echo)
        of_servers = [newest.replace(**{name: getattr(one, name) for name in SINK_DATABASE}) for one in (older, newest)]
        meters = [Meter(events, Stack(one).part("postgres")) for one in (older, newest)]
        names = (f"Postgres {version}", f"Postgres {MAJOR}")
        drains = (partial(_drain, *side) for side in zip(of_servers, meters, strict=True))

        def empty() -> None:
            for settings in of_servers:
                backlog.empty(settings)

        found = _in_turns(dict(zip(names, drains, strict=True)), rounds, "drain", before=empty)
    _ratios(found, "per_s", "cpu_s_per_million", "database_cpu_s_per_million")


def _drain(settings: Settings, meter: Meter, name: str = SINK) -> Drain:
    return backlog.drain_with(sink(settings, name), backlog.applied(settings, name), meter)


def _drain_by_the_book(settings: Settings, meter: Meter, result: str) -> Drain:
    applied = peers.applied(settings, by_the_book.NAME, result)
    return backlog.drain_with(peers.ByTheBook(settings, result), applied, meter)


@main.command("spans")
@click.option("--events", type=click.IntRange(1_000_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="How often each side drains the backlog.")
@click.option(
    "--transfers", default=2000, show_default=True, help="How many are made with a span, and how many without."
)
def measure_spans(events: int, rounds: int, transfers: int) -> None:
    """Drain a backlog of events that are all sampled, with a sink that exports spans and with one that does not, in
    turns; and make transfers whose append has a span, and others, in turns.
    """
    with _stack() as settings, spans.collector() as url:
        backlog.produce(settings, events, report=click.echo, are_sampled=True)
        meter = Meter(events, Stack(settings).part("postgres"))

        def drained(process: SinkProcess) -> Drain:
            return backlog.drain_with(process, backlog.applied(settings, SINK), meter)

        sides: dict[str, Callable[[], Drain]] = {
            "spans": lambda: drained(spans.Exporting(settings, SINK, url)),
            "none": lambda: drained(sink(settings, SINK)),
        }
        found = _in_turns(sides, rounds, "drain", before=lambda: backlog.empty(settings))
        _ratios(found, "per_s", "cpu_s_per_million")
        write.make_accounts(settings)
        with clients.function(clients.Load(settings, 1, write.ACCOUNTS["uniform"], 0)) as make:
            appended = spans.measure_appends(make, transfers, url)
    for side, run in appended.items():
        _print("append", side=side, **run._asdict())
    _ratios({side: [run] for side, run in appended.items()}, *append.Transfers._fields)


@main.command("kinds")
@click.option("--events", type=click.IntRange(400_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=3, show_default=True, help="How often each side drains its backlog.")
def drain_kinds(events: int, rounds: int) -> None:
    """Drain as many events of eight types on two topics as of one type on one topic, in turns, in a project of its own.

    The types have columns of their own, and the projection reads the view of each.
    """
    with kinds.project_in(HOME.with_name("bench-project")), _stack() as settings:
        topics.create(settings, connectors.topic_specs(settings))
        meter = Meter(events, Stack(settings).part("postgres"))
        sides: dict[str, Callable[[], Drain]] = {}
        for name, types in kinds.SINKS.items():
            kinds.produce(settings, types, events, report=click.echo)
            sides[name] = partial(_drain_kinds, settings, name, meter)
        found = _in_turns(sides, rounds, "drain", before=lambda: kinds.empty(settings))
    _ratios(found, "per_s", "cpu_s_per_million", "database_cpu_s_per_million")


def _drain_kinds(settings: Settings, name: str, meter: Meter) -> Drain:
    return backlog.drain_with(sink(settings, name), kinds.applied(settings, name), meter)


@main.command("peers")
@click.option("--events", type=click.IntRange(1_000_000), default=1_000_000, show_default=True)
@click.option("--rows", default=20_000, show_default=True, help="How many of them the row by row consumer drains.")
@click.option("--rounds", default=2, show_default=True, help="How often each side drains the backlog.")
def drain_peers(events: int, rows: int, rounds: int) -> None:
    """Drain a backlog with the sink, with Spark as its guides show it, with Debezium's JDBC sink connector (which only
    keeps the events, without balances), and record by record, in turns.
    """
    with _stack() as settings:
        backlog.produce(settings, events, report=click.echo)
        database = Stack(settings).part("postgres")
        ours, book, sink_connector, row = (Meter(number, database) for number in (events, events, events, rows))
        sides: dict[str, Callable[[], Drain]] = {
            "spark": partial(_drain, settings, ours),
            "by the book": partial(_drain_by_the_book, settings, book, "balances"),
            "JDBC connector": lambda: jdbc.drain(settings, sink_connector),
            "row by row": lambda: backlog.drain_here(row, row_by_row.drain(settings, rows)),
        }

        def empty() -> None:
            backlog.empty(settings)
            peers.empty(settings, "balances")

        found = _in_turns(sides, rounds, "drain", before=empty)
    _ratios(found, "per_s", "cpu_s_per_million")


@main.command("handlers")
@click.option("--events", type=click.IntRange(10_000), default=50_000, show_default=True)
@click.option("--rows", default=10_000, show_default=True, help="How many of them the row by row consumer drains.")
@click.option("--rounds", default=3, show_default=True, help="How often each side drains the backlog.")
def drain_with_a_handler(events: int, rows: int, rounds: int) -> None:
    """Drain a backlog with a handler, and record by record as tutorials show it, in turns: both do the same for an
    event, which is nothing, or to add it to a balance.
    """
    with _stack() as settings:
        backlog.produce(settings, events, report=click.echo)
        database = Stack(settings).part("postgres")
        ours, row = Meter(events, database), Meter(rows, database)

        def by_handler(name: str) -> Drain:
            return backlog.drain_with(handle.Handle(name, settings), backlog.applied(settings, name), ours)

        def by_row(name: str) -> Drain:
            return backlog.drain_here(row, row_by_row.drain(settings, rows, is_trivial=name == handle.TRIVIAL))

        def empty() -> None:
            backlog.empty(settings)
            peers.empty(settings, "balances")

        for name in (handle.TRIVIAL, handle.NAME):
            sides = {name: partial(by_handler, name), f"row by row, as {name}": partial(by_row, name)}
            _ratios(_in_turns(sides, rounds, "drain", before=empty), "per_s", "cpu_s_per_million")


@main.command("transform")
@click.option("--events", type=click.IntRange(1_000_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True, help="How often each side drains the backlog.")
def drain_with_a_transform(events: int, rounds: int) -> None:
    """Drain a backlog with the sink turnover, whose transform joins its events with rates, and with Spark as its guides
    show it with the same join, in turns. Beside them the sink balances, which has no transform.
    """
    with _stack() as settings:
        backlog.produce(settings, events, report=click.echo)
        database, result = Stack(settings).part("postgres"), "turnover"
        meter = Meter(events, database)

        def empty() -> None:
            backlog.empty(settings, result)
            peers.empty(settings, "balances", result)

        sides: dict[str, Callable[[], Drain]] = {
            "transform": partial(_drain, settings, meter, result),
            "by the book": partial(_drain_by_the_book, settings, meter, result),
            "no transform": partial(_drain, settings, meter),
        }
        found = _in_turns(sides, rounds, "drain", before=empty)
    _ratios(found, "per_s", "cpu_s_per_million", "database_cpu_s_per_million")


@main.command("lakehouse")
@click.option("--events", type=click.IntRange(400_000), default=1_000_000, show_default=True)
@click.option("--rounds", default=2, show_default=True, help="How often each side drains the backlog.")
def drain_into_a_lakehouse(events: int, rounds: int) -> None:
    """Drain a backlog into a Delta table with the sink lakehouse, and with a loop that merges the same DataFrame, in
    turns.
    """
    with _stack() as settings:
        backlog.produce(settings, events, report=click.echo)
        meter = Meter(events, Stack(settings).part("postgres"))
        hand, name = peers.MergeByHand(settings, BATCH_EVENTS), merge_by_hand.SINK

        def empty() -> None:
            backlog.empty(settings)
            peers.empty_lakehouse(settings)

        sides: dict[str, Callable[[], Drain]] = {
            "lakehouse": partial(_drain, settings, meter, name),
            "by hand": lambda: backlog.drain_with(hand, nullcontext(hand.merged), meter),
        }
        found = _in_turns(sides, rounds, "drain", before=empty)
    _ratios(found, "per_s", "cpu_s_per_million")


@main.command("cluster")
@click.option("--events", type=click.IntRange(400_000), default=1_000_000, show_default=True)
@click.option("--workers", default=2, show_default=True, help="The largest number of them, and of partitions.")
@click.option("--sink", "name", default=SINK, show_default=True, help="Or lakehouse.")
def drain_on_cluster(events: int, workers: int, name: str) -> None:
    """Drain a backlog in the driver's own threads (0 workers), and then on 1 to N workers with a core each."""
    with _stack(topic_partitions=max(workers, 1)) as settings:
        backlog.produce(settings, events, report=click.echo)
        for number in range(workers + 1):
            found = cluster.drain(settings, name, number, events, report=click.echo)
            times = {"read_s": found.read_s_per_million, "applied_s": found.applied_s_per_million}
            memory = {"driver_middle_mib": found.driver_middle_mib, "driver_end_mib": found.driver_end_mib}
            _print("cluster", workers=number, **found.drain._asdict(), **times, **memory)


@main.command("strategies")
@click.option("--batches", default=10, show_default=True, help=f"Of {BATCH_EVENTS} events each.")
@click.option("--keys", type=click.IntRange(1), default=strategies.ACCOUNTS, show_default=True, help="Of the events.")
def apply_strategies(batches: int, keys: int) -> None:
    """Apply the same batches with each strategy in turn; report the rates relative to `naive`.

    With as many keys as a batch has events, each event has a key of its own.
    """
    with _stack(["postgres"]) as settings:
        rates = strategies.rates(settings, batches, BATCH_EVENTS, keys)
    for name, rate in sorted(rates.items(), key=lambda entry: -entry[1]):
        ratio = round(rate / rates[strategies.NAIVE.name], 2)
        click.echo(json.dumps({"measure": "strategy", "name": name, "per_s": round(rate), "ratio_to_naive": ratio}))


@main.command("warehouse")
@click.option("--batches", default=8, show_default=True, help="Of 50,000 events each, as a plain sink has them.")
@click.option("--strategy", default="dedup", show_default=True)
def write_warehouse(batches: int, strategy: str) -> None:
    """Decode records and write them to a DuckDB file, by a target that is a function: MERGE by id and by version."""
    with _stack(["postgres"]) as settings:
        _print("warehouse", **warehouse.rates(settings, batches, BATCH_EVENTS // 2, strategy)._asdict())


@main.command()
@click.option("--batches", default=100, show_default=True, help=f"Of {BATCH_EVENTS} events each.")
@click.option("--days", default=10, show_default=True, help="Spread the events over this many days.")
def growth(batches: int, days: int) -> None:
    """Compare the rate of strategy `dedup` in the first and in the last tenth of a growing history."""
    with _stack(["postgres"]) as settings:
        found = strategies.growth(settings, batches, BATCH_EVENTS, days)
    tenth = max(1, batches // 10)
    first, last = statistics.harmonic_mean(found[:tenth]), statistics.harmonic_mean(found[-tenth:])
    rates = {"first_per_s": round(first), "last_per_s": round(last), "ratio": round(last / first, 2)}
    click.echo(json.dumps({"measure": "dedup_growth", "events": batches * BATCH_EVENTS, "days": days, **rates}))


@main.command("check")
@click.option("--events", type=click.IntRange(100), default=1_000_000, show_default=True)
def check_topic(events: int) -> None:
    """Run `outbox check` on a large topic, in full, and then incrementally with one event in a hundred more."""
    with _stack() as settings:
        check.fill(settings, events, report=click.echo)
        _print("check", run="full", **check.check(settings, "--incremental")._asdict())
        check.relay_more(settings, max(events // 100, 1000))
        _print("check", run="incremental", **check.check(settings, "--incremental")._asdict())


@main.command("sizes")
def bytes_per_event() -> None:
    """Bytes per event in the outbox, on the topic, and as a remembered id."""
    with _stack() as settings:
        _print("bytes_per_event", **sizes.measure(settings))


@contextmanager
def _stack(parts: Sequence[str] = PARTS, home: Path = HOME, /, **settings: Any) -> Iterator[Settings]:
    interrupt.once()  # whatever signal ends us, the stack ends too
    if home.exists():  # of one that was killed
        Stack(load(home, environment=False)).reset()
    stack = private_stack(home, **settings)
    try:
        stack.up(parts, report=_progress)
        migrate(stack.settings)
        yield stack.settings
    finally:
        stack.down()


def _in_turns(
    sides: Mapping[str, Callable[[], R]],
    rounds: int,
    measure: str | None = None,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[R]]:
    """The result of each side in each round. Printed under the name of a measure, if there is one."""
    found: dict[str, list[R]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            before()
            found[name].append(side())
            if measure:
                _print(measure, side=name, **found[name][-1]._asdict())
    return found


def _ratios(found: Mapping[str, Sequence[object]], *measures: str) -> None:
    """Print by how much the first side exceeds each of the others."""
    first, *others = found
    for other in others:
        for what in measures:
            _ratio(f"{first} to {other}", what, found[first], found[other])


def _ratio(measure: str, what: str, ours: Sequence[object], theirs: Sequence[object], **of: object) -> None:
    """Print by how much one side exceeds the other, of the runs of each round."""
    value = operator.attrgetter(what)
    ratios = [value(one) / value(other) for one, other in zip(ours, theirs, strict=True)]
    _print(measure, **of, what=what, median=statistics.median(ratios), low=min(ratios), high=max(ratios))


def _print_quantiles(measure: str, load: str, side: str, values: Sequence[float]) -> None:
    cuts = statistics.quantiles(values, n=100)
    _print(measure, load=load, side=side, p50_ms=cuts[49] * 1e3, p99_ms=cuts[98] * 1e3)


def _progress(what: str) -> None:
    """Report the current step on the standard error. Results alone are printed to the standard output."""
    click.echo(f"  {what}", err=True)


def _print(measure: str, **values: object) -> None:
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in values.items()}
    click.echo(json.dumps({"measure": measure, **rounded}))


if __name__ == "__main__":
    main()
