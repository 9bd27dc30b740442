"""`append` by asyncpg and by psycopg2: one client, one event a transaction, on the engine of either kind of service."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox import aio
from outbox.base.settings import Settings
from outbox.http.async_database import make_async_engine
from outbox.http.database import make_engine
from outbox.writing import append
from outbox.writing.event import Event

from bench.append import Transfers
from bench.event import payload

Side = Callable[[int], Transfers]
"""Makes so many transactions, one after the other."""


def event() -> Event:
    """An event of an account of its own."""
    account = str(uuid.uuid4())
    return Event("balance", account, "credited", json.loads(payload(account, 1, 1)))


@contextmanager
def psycopg2(settings: Settings) -> Iterator[Side]:
    """`outbox.append` on a connection."""
    engine = make_engine(settings)

    def run(transactions: int) -> Transfers:
        times = []
        for _ in range(transactions):
            one, began = event(), _now()
            with engine.begin() as connection:
                append.append(connection, one)
            times.append(_since(began))
        return _median(times)

    yield run
    engine.dispose()


@contextmanager
def asyncpg(settings: Settings) -> Iterator[Side]:
    """`outbox.aio.append` on a connection for asyncio."""
    engine = make_async_engine(settings)

    async def run(transactions: int) -> Transfers:
        times = []
        for _ in range(transactions):
            one, began = event(), _now()
            async with engine.begin() as connection:
                await aio.append(connection, one)
            times.append(_since(began))
        return _median(times)

    with asyncio.Runner() as runner:
        yield lambda transactions: runner.run(run(transactions))
        runner.run(engine.dispose())


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> Transfers:
    return Transfers(*(1000 * (now - then) for now, then in zip(_now(), began, strict=True)))


def _median(times: list[Transfers]) -> Transfers:
    return Transfers(*map(statistics.median, zip(*times, strict=True)))
