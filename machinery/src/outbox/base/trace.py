"""W3C trace context, as a `traceparent` tells it: passed on from the request to the event, and never made up.

A request without one is in no trace, and neither are its events.
"""

from __future__ import annotations

import re

# The lowest bit of the flags: who sent it records the trace. Other bits, like that of a random id, may be set as well.
SAMPLED_ENDINGS = tuple("13579bdf")

# Version, trace id, parent id, flags; version ff and ids of zeros are invalid.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid(traceparent: str | None) -> str | None:
    return traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None


def trace_id(traceparent: str | None) -> str | None:
    """The id that all of a trace shares, if the traceparent is valid."""
    return None if valid(traceparent) is None else str(traceparent)[3:35]


def is_sampled(traceparent: str | None) -> bool:
    """Whether it is valid and its sender records the trace."""
    return valid(traceparent) is not None and str(traceparent).endswith(SAMPLED_ENDINGS)
