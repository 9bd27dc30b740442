"""Where a sink keeps its Spark checkpoint; and, if that is a folder of this host, how far Spark has committed it.

This is for commands that look at a sink without Spark. The sink itself reads its checkpoint through Hadoop's file
system (`outbox.sink.spark.checkpoint`, which describes the files).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from outbox.base.settings import Settings

LOCAL = re.compile(r"(?:file:(?://)?)?(/.*)")
LINES = {"offsets": 3, "commits": 2, "sources": 2, "metadata": 1}  # of a file, at least; the last one is a JSON object


def uri(settings: Settings, sink: str, generation: int) -> str:
    """The checkpoint of a generation of a sink: each rewind starts a new generation."""
    return f"{settings.checkpoints.rstrip('/')}/{f'{sink}.{generation}' if generation else sink}"


def folder(of_uri: str) -> Path | None:
    """The folder of a checkpoint; None if it is elsewhere, as in an object store. Nothing is percent-encoded."""
    found = LOCAL.fullmatch(of_uri)
    return Path(found[1]) if found else None


def is_complete(file: str, text: str) -> bool:
    """Whether a file, by its path in the checkpoint, is whole: a crash of the host may truncate it anywhere."""
    lines = text.rstrip().split("\n")
    if len(lines) < LINES[file.partition("/")[0]]:
        return False
    try:
        return isinstance(json.loads(lines[-1]), dict)
    except ValueError:
        return False


def committed(checkpoint: Path) -> dict[str, dict[int, int]] | None:
    """By topic and partition the offsets up to which batches are committed; None without any.

    A log file that is truncated, or that the sink is just removing, does not count; the sink ignores it too.
    """
    batches = sorted((int(file.name) for file in (checkpoint / "commits").glob("[0-9]*")), reverse=True)
    for batch in batches:
        try:
            if not is_complete("commits", (checkpoint / "commits" / str(batch)).read_text()):
                continue
            by_topic = json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])
        except (FileNotFoundError, IndexError, ValueError):
            continue
        return {
            topic: {int(partition): offset for partition, offset in of_topic.items()}
            for topic, of_topic in by_topic.items()
        }
    return None
