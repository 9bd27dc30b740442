"""Measure the apply alone, on batches made in memory: each strategy, and `dedup` while its history grows.

`NAIVE` is the baseline: it takes every event as new, so it pays only for the COPY, projections and positions.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole
from outbox.sink import discovery
from outbox.sink.decoding.batch import Batch
from outbox.sink.decoding.records import Decoded, fetcher
from outbox.sink.decoding.values import Columns
from outbox.sink.remembering import strategy
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.spec import SinkSpec
from outbox.sink.writer import SinkWriter

from bench.event import uuid7

ACCOUNTS = 1_000
DAY_MS = 24 * 60 * 60 * 1000
EVENT = "balance.credited"
NAIVE = Strategy(name="naive", memory=None, select="INSERT INTO new_events SELECT * FROM outbox_batch")


def rates(settings: Settings, batches: int, batch_events: int, keys: int) -> dict[str, float]:
    """Events per second of each strategy, `NAIVE` among them, with the events of so many keys; of as many as a batch
    has events, each has one. They take turns batch by batch, so that the machine is the same for all.
    """
    spent_s: dict[str, float] = {}
    with ExitStack() as resources:
        known = {one.name: one for one in strategy.load(strategy.BUILT_IN).values()}
        sinks = [resources.enter_context(_open(settings, _by(settings, one))) for one in [NAIVE, *known.values()]]
        spec = _by(settings, NAIVE)
        for batch in _batches(spec, batches, batch_events, days=1, keys=keys):
            for sink in sinks:
                spent_s[sink.name] = spent_s.get(sink.name, 0) + _timed(sink, batch)
    return {name: batches * batch_events / seconds for name, seconds in spent_s.items()}


def growth(settings: Settings, batches: int, batch_events: int, days: int) -> Sequence[float]:
    """Events per second of `dedup`, batch by batch, while the number of remembered events grows."""
    spec = _by(settings, strategy.find("dedup"))
    with _open(settings, spec) as sink:
        return [batch_events / _timed(sink, batch) for batch in _batches(spec, batches, batch_events, days)]


def _by(settings: Settings, chosen: Strategy) -> SinkSpec:
    """The balances by a strategy, from one event; the sink is called like the strategy."""
    job = replace(discovery.sinks(settings)["balances"].job, name=chosen.name, events=[EVENT])
    return replace(discovery.resolve(settings, job), strategy=chosen)


@contextmanager
def _open(settings: Settings, one: SinkSpec) -> Iterator[SinkWriter]:
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        yield one.target.writer(settings, connection, one, fetcher(settings))


def _timed(sink: SinkWriter, batch: Batch) -> float:
    began = time.monotonic()
    sink.apply(batch)
    return time.monotonic() - began


def _batches(spec: SinkSpec, batches: int, batch_events: int, days: int, keys: int = ACCOUNTS) -> Iterator[Batch]:
    """Batches of new events for a sink and others of the same events, with ids of the last days."""
    [topic] = spec.topics
    chunking = replace(spec.chunking(topic), with_days=True)
    accounts = [str(uuid.uuid4()) for _ in range(keys)]
    versions = dict.fromkeys(accounts, 0)
    step_ms = days * DAY_MS / (batches * batch_events)
    made_at_ms = time.time() * 1000 - days * DAY_MS
    for start in range(0, batches * batch_events, batch_events):
        chosen = (
            random.sample(accounts, batch_events) if keys >= batch_events else random.choices(accounts, k=batch_events)
        )
        ids, numbers = [], []
        for key in chosen:
            made_at_ms += step_ms
            versions[key] += 1
            ids.append(str(uuid7(int(made_at_ms))))
            numbers.append(versions[key])
        rows: Columns = {
            "event_id": ids,
            "partition": [0] * batch_events,
            "offset": range(start, start + batch_events),
            "transfer_id": ids,
            "account_id": chosen,
            "amount": [1] * batch_events,
            "currency": ["EUR"] * batch_events,
            "balance_after": numbers,
            "version": numbers,
            "occurred_at": [datetime.now(UTC)] * batch_events,
        }
        chunk = chunking.of_decoded(Decoded({EVENT: rows}, []))
        yield Batch(topic, "bench", {0: start}, {0: start + batch_events}, chunk)
