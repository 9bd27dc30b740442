"""The links between two parts: cut, slow, or half-open."""

from __future__ import annotations

import random
from functools import partial

from outbox_lab.soak.fault import FaultOfPart, Make, wait_or_not_fired
from outbox_lab.soak.proxy import Proxy
from outbox_lab.soak.testbed import LINKS, Testbed

DELAY_S = 0.3
LONG_SHARE, LONG_S = 0.3, (35.0, 70.0)  # clients of Kafka and of the databases wait for 30 s, a WAL sender for 60 s


class Link(FaultOfPart):
    """A fault of one link. It has happened once it has ended a connection in use, or held up what came through it."""

    effect: str
    """What the proxy counts."""

    def fire(self, testbed: Testbed, _: random.Random) -> str:
        proxy = testbed.links[self.part]
        before = proxy.bytes

        def in_use() -> bool:
            return proxy.bytes > before and proxy.connections > 0

        def affected() -> int:
            wait_or_not_fired(f"link {self.part} to be used", in_use, timeout_s=60, poll_s=0.001)
            connections = self.affect(proxy)
            if not connections:  # the last one has ended meanwhile
                proxy.heal()
            return connections

        connections = wait_or_not_fired(f"a connection on link {self.part}", affected, timeout_s=60)
        wait_or_not_fired(f"{self.effect} on link {self.part}", lambda: proxy.affected, timeout_s=60)
        return f"{connections} connections, {proxy.affected} {self.effect} so far"

    def affect(self, proxy: Proxy) -> int:
        """Break the link, and return how many connections it had."""
        raise NotImplementedError

    def heal(self, testbed: Testbed) -> None:
        testbed.links[self.part].heal()


class Cut(Link):
    """Every connection is closed, and new ones are refused."""

    what, effect = "cut", "ended"

    def affect(self, proxy: Proxy) -> int:
        return proxy.cut()


class Slow(Link):
    """Each packet is 0.3 s late."""

    what, effect = "slow", "chunks delayed"

    def affect(self, proxy: Proxy) -> int:
        return proxy.delay(DELAY_S)


class HalfOpen(Link):
    """Connections stay and begin, and no byte passes, sometimes for longer than clients wait."""

    what, effect = "half-open", "chunks held"

    def draw_duration_s(self, chance: random.Random) -> float:
        return chance.uniform(*(LONG_S if chance.random() < LONG_SHARE else self.lasts_s))

    def affect(self, proxy: Proxy) -> int:
        return proxy.freeze()


FAULTS: list[Make] = [partial(kind, link) for link in LINKS for kind in (Cut, Slow, HalfOpen)]
