"""Clients that act at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def all_at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """Call ``work`` in so many threads, which start at the same moment."""
    barrier = threading.Barrier(count)

    def start(number: int) -> T:
        barrier.wait(30)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))
