"""The demo's requests to this project's service: parcels arrive at depots.

The walkthrough, `outbox demo`, plays it. A project of another domain replaces it.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from outbox_lab.walkthrough import Request

DEPOTS = 100
INVALID_SHARE = 0.05


class Workload:
    """Plans requests from a seed: where how many parcels arrive, and which requests are invalid."""

    right = "depots"  # the sink that is right under every fault
    naive = None  # this project has no sink that drifts

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._depots = [str(uuid.UUID(int=self._random.getrandbits(128), version=4)) for _ in range(DEPOTS)]

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        """Open the depots: the first arrival does."""
        send([self._arrival(depot) for depot in self._depots])

    def plan(self) -> Request:
        """An arrival; one in twenty is invalid."""
        depot = self._random.choice(self._depots)
        if self._random.random() >= INVALID_SHARE:
            return self._arrival(depot)
        return self._random.choice(
            [
                Request("not JSON", "/parcels", b"{count: ", (400,)),
                Request("no token", "/parcels", {"depot_id": depot, "count": 1}, (401,), has_token=False),
                Request("no parcels", "/parcels", {"depot_id": depot, "count": 0}, (422,)),
                Request("no Idempotency-Key", "/parcels", {"depot_id": depot, "count": 1}, (400, 422), has_key=False),
            ]
        )

    def _arrival(self, depot: str) -> Request:
        body = {"depot_id": depot, "count": self._random.randint(1, 500)}
        return Request("arrival", "/parcels", body, (201,), events=1)
