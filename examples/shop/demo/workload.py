"""The demo's requests to this project's service: the shelf is filled, orders are placed and cancelled.

The walkthrough, `outbox demo`, plays it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from outbox_lab.walkthrough import Request

PRODUCTS = [f"TEA-{number}" for number in range(40)]
ON_THE_SHELF, RARE = 1_000_000, 50  # pieces; the first product is soon sold out
FIRST_ORDERS = 300
CANCELLED_SHARE = 0.1
INVALID_SHARE = 0.05


class Workload:
    """Plans requests from a seed: who orders what, which orders are cancelled, and which requests are invalid."""

    right = "orders"  # the sink that is right under every fault
    naive = None  # this project has no sink that drifts

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._orders: list[str] = []

    def set_up(self, send: Callable[[Sequence[Request]], list[Any]]) -> None:
        """Fill the shelf, and place the orders that are cancelled later."""
        pieces = dict.fromkeys(PRODUCTS, ON_THE_SHELF) | {PRODUCTS[0]: RARE}
        send([Request("filling", "/stock", {"product": p, "pieces": n}, (201,), events=1) for p, n in pieces.items()])
        placed = send([self._order(PRODUCTS[1:]) for _ in range(FIRST_ORDERS)])
        self._orders = [order["id"] for order in placed]

    def plan(self) -> Request:
        """An order; one in ten is a cancellation, one in twenty is invalid."""
        chance = self._random.random()
        if chance < INVALID_SHARE:
            return self._random.choice(
                [
                    Request("not JSON", "/orders", b"{lines: ", (400,)),
                    Request("no token", "/orders", {"lines": []}, (401,), has_token=False),
                    Request("no lines", "/orders", {"lines": []}, (422,)),
                    Request("no Idempotency-Key", "/orders", {"lines": []}, (400, 422), has_key=False),
                ]
            )
        if chance < INVALID_SHARE + CANCELLED_SHARE and self._orders:
            order = self._orders.pop(self._random.randrange(len(self._orders)))
            return Request("cancellation", f"/orders/{order}/cancel", {}, (200,), events=2)
        return self._order(PRODUCTS)

    def _order(self, products: Sequence[str]) -> Request:
        """An order of one product, which may be sold out: an event of the stock, and one of the order."""
        line = {"product": self._random.choice(products), "pieces": self._random.randint(1, 5), "cents": 450}
        return Request("order", "/orders", {"lines": [line]}, (201, 409), events=2)
