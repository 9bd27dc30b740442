"""Cost of validating events in the write transaction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar
from unittest.mock import patch

from outbox.writing import event

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
    return {side: Transfers(*map(statistics.median, zip(*times, strict=True))) for side, times in found.items()}


def _timed(make: Callable[[], None]) -> Transfers:
    began_s, used_s = time.perf_counter(), time.process_time()
    make()
    return Transfers(1000 * (time.perf_counter() - began_s), 1000 * (time.process_time() - used_s))
