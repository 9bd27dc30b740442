"""Where a sink keeps its Spark checkpoint. `outbox.sink.running.checkpoint` reads it."""

from __future__ import annotations

import re
from pathlib import Path

from outbox.base.settings import Settings

LOCAL = re.compile(r"(?:file:(?://)?)?(/.*)")


def uri(settings: Settings, sink: str, generation: int) -> str:
    """The checkpoint of a generation of a sink: one that cannot be continued is left for the next."""
    return f"{settings.checkpoints.rstrip('/')}/{f'{sink}.{generation}' if generation else sink}"


def folder(of_uri: str) -> Path | None:
    """The folder of a checkpoint; None if it is elsewhere, as in an object store. Nothing is percent-encoded."""
    found = LOCAL.fullmatch(of_uri)
    return Path(found[1]) if found else None
