"""Cost of `append`: with validation and without, and by asyncpg and by psycopg2."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar
from unittest.mock import patch

from outbox import aio
from outbox.base.settings import Settings
from outbox.http.async_database import make_async_engine
from outbox.http.database import make_engine
from outbox.writing import append, event
from outbox.writing.event import Event

from bench.event import payload

K = TypeVar("K")


class Transfers(NamedTuple):
    """Transfers that one client has made, one after the other."""

    transaction_ms: float  # the median
    cpu_ms: float  # the median of the service's processor time


def measure(make: Callable[[], None], transfers: int) -> dict[bool, Transfers]:
    """Make transfers in turns with validation and without it, so that both see the same load of the machine.

    Without validation `append` still refuses an undeclared event, and encodes the payload.
    """
    return alternated(make, transfers, {True: nullcontext(), False: patch.object(event, "_require_valid")})


def alternated(
    make: Callable[[], None], transfers: int, sides: Mapping[K, AbstractContextManager[object]]
) -> dict[K, Transfers]:
    """Make transfers in turns, each side in its context."""
    found: dict[K, list[Transfers]] = {side: [] for side in sides}
    for _ in range(transfers):
        for side, times in found.items():
            with sides[side]:
                times.append(_timed(make))
    return {side: median(times) for side, times in found.items()}


def median(times: Iterable[Transfers]) -> Transfers:
    """The median of each time."""
    return Transfers(*map(statistics.median, zip(*times, strict=True)))


Side = Callable[[int], Transfers]
"""Makes so many transactions, one after the other."""


def new_event() -> Event:
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
            one, began = new_event(), _now()
            with engine.begin() as connection:
                append.append(connection, one)
            times.append(_since(began))
        return median(times)

    yield run
    engine.dispose()


@contextmanager
def asyncpg(settings: Settings) -> Iterator[Side]:
    """`outbox.aio.append` on a connection for asyncio."""
    engine = make_async_engine(settings)

    async def run(transactions: int) -> Transfers:
        times = []
        for _ in range(transactions):
            one, began = new_event(), _now()
            async with engine.begin() as connection:
                await aio.append(connection, one)
            times.append(_since(began))
        return median(times)

    with asyncio.Runner() as runner:
        yield lambda transactions: runner.run(run(transactions))
        runner.run(engine.dispose())


def _timed(make: Callable[[], None]) -> Transfers:
    began = _now()
    make()
    return _since(began)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> Transfers:
    return Transfers(*(1000 * (now - then) for now, then in zip(_now(), began, strict=True)))
