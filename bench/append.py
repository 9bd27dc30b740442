"""Cost of validating events in the write transaction."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

from outbox.base import project
from outbox.writing import event


class Transfers(NamedTuple):
    """Transfers that one client has made, one after the other."""

    transaction_ms: float  # the median
    cpu_ms: float  # the median of the service's processor time


def measure(make: Callable[[], None], transfers: int) -> dict[bool, Transfers]:
    """Make transfers in turns with validation and without it, so that both see the same load of the machine.

    Without validation `append` still refuses an undeclared event, and encodes the payload.
    """
    contract = event.contract(os.environ.get(project.VARIABLE))
    found: dict[bool, list[Transfers]] = {True: [], False: []}
    for _ in range(transfers):
        for validates, times in found.items():
            with patch.object(event, "contract", return_value=replace(contract, validates=validates)):
                times.append(_timed(make))
    return {
        validates: Transfers(*map(statistics.median, zip(*times, strict=True))) for validates, times in found.items()
    }


def _timed(make: Callable[[], None]) -> Transfers:
    began_s, used_s = time.perf_counter(), time.process_time()
    make()
    return Transfers(1000 * (time.perf_counter() - began_s), 1000 * (time.process_time() - used_s))
