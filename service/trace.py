"""W3C trace context: the traceparent of a request goes into the events that it causes."""

from __future__ import annotations

import re

# Version, trace id, parent id, flags; version ff and ids of zeros are invalid.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid(traceparent: str | None) -> str | None:
    """The traceparent if it is valid. Nothing is made up for a request without: it is in no trace."""
    return traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None
