"""The links between two parts: cut, slow, or half-open."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from outbox.base.wait import wait_for
from outbox.soak.fault import Fault, NotFired
from outbox.soak.proxy import Proxy
from outbox.soak.testbed import LINKS, Testbed

DELAY_S = 0.3


class Link(Fault):
    """A fault of one link. It has happened once it held up or ended a connection that was in use."""

    what: str

    def __init__(self, link: str) -> None:
        self.link = link
        self.parts = (link,)
        self.name = f"{link}-{self.what}"

    def fire(self, testbed: Testbed, chance: random.Random) -> str:
        del chance
        proxy = testbed.links[self.link]
        before = proxy.bytes

        def in_use() -> bool:
            return proxy.bytes > before and proxy.connections > 0

        try:
            wait_for(f"link {self.link} to be used", in_use, timeout_s=60)
        except TimeoutError as error:
            raise NotFired(str(error)) from error
        connections = self.affect(proxy)
        if not connections:
            raise NotFired(f"link {self.link} had no connection")
        return f"{connections} connections, on which {proxy.bytes - before} bytes had just passed"

    def affect(self, proxy: Proxy) -> int:
        """Break the link, and return how many connections it had."""
        raise NotImplementedError

    def heal(self, testbed: Testbed) -> None:
        testbed.links[self.link].heal()


class Cut(Link):
    """Every connection is closed, and new ones are refused."""

    what = "cut"

    def affect(self, proxy: Proxy) -> int:
        return proxy.cut()


class Slow(Link):
    """Each packet is 0.3 s late."""

    what = "slow"

    def affect(self, proxy: Proxy) -> int:
        return proxy.delay(DELAY_S)


class HalfOpen(Link):
    """Connections stay and new ones are accepted, and no byte passes."""

    what = "half-open"

    def affect(self, proxy: Proxy) -> int:
        return proxy.freeze()


FAULTS: list[Callable[[], Fault]] = [partial(kind, link) for link in LINKS for kind in (Cut, Slow, HalfOpen)]
