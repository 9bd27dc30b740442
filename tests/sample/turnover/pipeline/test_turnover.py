"""The sink `turnover` as a process: each transfer counts once, whatever happens, and no money is forgotten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from flask import Flask

from outbox.audit import check
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import spec
from outbox.sink.repair import replay as repair
from outbox.sink.repair.replay import Replayed
from outbox.sink.repair.selection import Selection
from outbox.sink.spark import transform as replaying
from outbox.testing.command import outbox
from outbox.testing.fixtures.spark import leaves_sockets
from outbox.testing.queries import query
from service.app import create_app
from sinks.turnover import transform
from tests.sample.ledger import Client
from tests.support.made_events import Event
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    Publisher,
    catch_up,
    kill_between_commits,
    logged,
    running,
    wait_applied,
    wait_caught_up,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = leaves_sockets

SINK = "turnover"
RATES = {"EUR": ("Europe", "1"), "USD": ("Americas", "0.8639"), "JPY": ("Asia", "0.5524")}
UNKNOWN = "NOK"
FEW, MANY = 40, 300  # that the driver reads itself, and that executors read

Table = dict[str, tuple[object, ...]]


def held(settings: Settings) -> Table:
    """What the sink holds, by currency: all events are of one day."""
    rows = query(
        settings,
        "SELECT currency, region, transfers, amount_minor, euro_cents FROM turnover"
        f" WHERE sink = '{SINK}' AND day = '2026-11-21'",
        SinkRole.AUDITOR,
    )
    return {str(currency): tuple(values) for currency, *values in rows}


def due(events: Sequence[Event]) -> Table:
    """What it should hold."""
    by_currency = defaultdict[str, list[int]](list)
    for event in events:
        by_currency[event.unit].append(event.quantity)
    return {
        currency: (region, len(amounts), sum(amounts), sum(_euro_cents(amount, rate) for amount in amounts))
        for currency, (region, rate) in RATES.items()
        if (amounts := by_currency[currency])
    }


def _euro_cents(amount: int, rate: str) -> Decimal:
    return Decimal(round(amount * Decimal(rate)))


def transfers(publisher: Publisher, count: int) -> list[Event]:
    """Credits in currencies with a rate, and each tenth in one without."""
    currencies = list(RATES)
    return [
        replace(event, unit=UNKNOWN if number % 10 == 9 else currencies[number % len(currencies)])
        for number, event in enumerate(publisher.events(count))
    ]


def without_rate(events: Sequence[Event]) -> dict[str, str]:
    return {event.event_id: "no rate" for event in events if event.unit == UNKNOWN}


def caught_up(settings: Settings) -> None:
    """Run the sink until it has applied everything."""
    done = catch_up(settings, SINK)
    assert done.returncode == 0, done.stderr


def command(settings: Settings, *words: str, status: int = 0) -> str:
    done = outbox(*words, home=settings.home, **settings.as_env())
    assert done.returncode == status, done.stderr
    return done.stdout


@pytest.mark.parametrize("count", [FEW, MANY], ids=["few", "many"])
def test_money_is_summed_in_euros_or_set_aside(topic: Settings, publisher: Publisher, count: int) -> None:
    events = transfers(publisher, count)
    publisher.send(events)
    publisher.send(events[:5])
    caught_up(topic)
    assert held(topic) == due(events)
    assert Database(topic, SINK).dead_letters() == without_rate(events)


def test_a_sink_killed_between_its_commit_and_sparks_counts_each_transfer_once(
    topic: Settings, publisher: Publisher
) -> None:
    events = transfers(publisher, 2 * FEW)
    publisher.send(events[:FEW])
    with running(topic, SINK) as sink:
        wait_applied(sink, Database(topic, SINK), FEW - len(without_rate(events[:FEW])))
        wait_caught_up(sink, topic, [SINK])
        killed_in = kill_between_commits(sink, topic, [SINK], lambda: publisher.send(events[FEW:]))
    assert held(topic) == due(events)
    done = catch_up(topic, SINK)
    assert done.returncode == 0, done.stderr
    first = logged(done, "applied")[0]
    assert first["batch"] == killed_in[SINK], "Spark delivered the batch again"
    assert held(topic) == due(events)
    assert Database(topic, SINK).dead_letters() == without_rate(events)


def test_a_rate_that_comes_later_lets_a_replay_count_what_was_set_aside(
    topic: Settings, publisher: Publisher, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = transfers(publisher, FEW)
    publisher.send(events)
    caught_up(topic)
    missing = without_rate(events)
    command(topic, "dead-letters", "replay", "--sink", SINK, "--all", status=1)
    assert held(topic) == due(events)
    rates = tmp_path / "rates.csv"
    rates.write_text(transform.FILE.read_text() + f"{UNKNOWN},Europe,0.0855\n")
    monkeypatch.setattr(transform, "FILE", rates)
    monkeypatch.setitem(RATES, UNKNOWN, ("Europe", "0.0855"))
    assert replay(topic) == Replayed(applied=len(missing))
    assert held(topic) == due(events)
    assert replay(topic) == Replayed()


def replay(settings: Settings) -> Replayed:
    """Replay all open letters of the sink, in this process and its Spark."""
    known = spec.sinks(settings)
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        with connection.cursor() as cursor:
            chosen = Selection(sink=SINK).choose(cursor)
        connection.rollback()
        if not chosen:
            return Replayed()
        applier = replaying.applier(settings, known[SINK], dry_run=False)
        return repair.replay(connection, known, chosen, applier_of=lambda _: applier)[SINK]


def test_rewind_and_rebuild_come_to_the_same_table(topic: Settings, publisher: Publisher) -> None:
    events = transfers(publisher, MANY)
    publisher.send(events)
    caught_up(topic)
    command(topic, "rewind", SINK, "--to-earliest", "--yes")
    caught_up(topic)
    assert held(topic) == due(events)
    query(topic, f"UPDATE turnover SET euro_cents = 1 WHERE sink = '{SINK}'", SinkRole.OWNER)
    command(topic, "rebuild", SINK, "--from", "topic", "--yes")
    assert held(topic) == due(events)
    assert Database(topic, SINK).dead_letters() == without_rate(events)


def test_check_compares_it_with_the_transfers_of_the_source(chain: Settings) -> None:
    app: Flask = create_app(chain)
    client = Client(app, chain)
    for currency, amount in (("EUR", 500), ("USD", 700), ("JPY", 11)):
        user = client.open(currency=currency)
        client.fund(user, amount, currency)
    command(chain, "check", "--wait", "60", status=0)
    caught_up(chain)
    report = check.check(chain)
    assert report.sink(SINK).drift == {}
    query(chain, "UPDATE turnover SET amount_minor = amount_minor + 3 WHERE currency = 'USD'", SinkRole.OWNER)
    assert check.check(chain).sink(SINK).drift == {"USD": 3}
