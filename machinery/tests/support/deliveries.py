"""The deliveries that each strategy survives. A new strategy is one row of PROMISES."""

from __future__ import annotations

from typing import NamedTuple


class Promise(NamedTuple):
    """Whether the result of a strategy is right although events are read, or sent, again."""

    re_reads: bool
    re_sends: bool


PROMISES = {
    "dedup": Promise(re_reads=True, re_sends=True),
    "merge": Promise(re_reads=True, re_sends=True),
    "upsert": Promise(re_reads=True, re_sends=True),
    "versions": Promise(re_reads=True, re_sends=True),
    "offsets": Promise(re_reads=True, re_sends=False),
    "naive": Promise(re_reads=False, re_sends=False),
}
SURVIVES_RE_SENDS = [name for name, promise in PROMISES.items() if promise.re_sends]
