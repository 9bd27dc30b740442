"""W3C trace context, as a `traceparent` tells it, and the sampled events among records.

A request without one is in no trace, and neither are its events, unless the service has spans (`outbox.base.spans`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

# The lowest bit of the flags: who sent it records the trace. Other bits, like that of a random id, may be set as well.
SAMPLED_ENDINGS = tuple("13579bdf")
LINKS_MAX = 128  # OpenTelemetry's own limit of a span

# Version, trace id, parent id, flags; version ff and ids of zeros are invalid.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class SampledEvents(NamedTuple):
    """Events whose senders record their traces: the first `LINKS_MAX`, and the number of all.

    Of each: traceparent and id, not validated, and the time of its record in milliseconds since 1970.
    """

    first: Sequence[tuple[bytes, bytes | None, int]] = ()
    total: int = 0

    @classmethod
    def together(cls, parts: Iterable[SampledEvents]) -> SampledEvents:
        """The sampled events of all parts."""
        parts = list(parts)
        first = chain.from_iterable(part.first for part in parts)
        return cls(tuple(islice(first, LINKS_MAX)), sum(part.total for part in parts))


def valid(traceparent: str | None) -> str | None:
    return traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None


def trace_id(traceparent: str | None) -> str | None:
    """The id that all of a trace shares, if the traceparent is valid."""
    return None if valid(traceparent) is None else str(traceparent)[3:35]


def is_sampled(traceparent: str | None) -> bool:
    """Whether it is valid and its sender records the trace."""
    return valid(traceparent) is not None and str(traceparent).endswith(SAMPLED_ENDINGS)
