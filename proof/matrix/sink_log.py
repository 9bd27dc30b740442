"""The log of the sinks: where each of them began to read, and how many rows it has processed since."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.matrix.topic_log import Offsets


@dataclass
class Work:
    """The work of one sink, in a part of the log."""

    rows: int = 0
    beginnings: list[Offsets] = field(default_factory=list)  # of each start


def size_bytes(file: Path) -> int:
    """How long the log is."""
    return file.stat().st_size if file.exists() else 0


def read(file: Path, since_bytes: int) -> dict[str, Work]:
    """By sink, its work since then."""
    found: dict[str, Work] = {}
    for line in _lines(file, since_bytes):
        work = found.setdefault(line["sink"], Work()) if "sink" in line else Work()
        if line["event"] == "applied":
            work.rows += line["rows"]
        elif line["event"] == "started":
            (offsets,) = line["next_offsets"].values()
            work.beginnings.append({int(partition): offset for partition, offset in offsets.items()})
    return found


def _lines(file: Path, since_bytes: int) -> Iterator[dict[str, Any]]:
    with file.open("rb") as log:
        log.seek(since_bytes)
        for line in log.read().splitlines():
            if line.startswith(b"{"):
                yield json.loads(line)
