"""The strategies: SQL files, each a way to tell a new event from a duplicate, with what it costs said at its top.

A strategy reads the temporary table ``staged`` (the batch) and leaves in ``fresh`` (same columns) what the projection
is to apply. It may use its own tables; ``%(sink)s`` is the sink's name,
``%(topic)s`` and ``%(topic_id)s`` are the topic's, and a literal percent sign is written twice.

A strategy may put events of ``staged`` into ``rejected`` (event_id, reason, detail) as a projection does: they are kept
as dead letters. It need not think of those that the projection refuses: what it notes of them is rolled back with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outbox.base.errors import Failure

REQUIRED = ("idea", "survives", "costs", "choose")
OTHERWISE = {"start": "earliest", "knows": "positions", "takes": "states"}  # what a header may say, against the default


@dataclass(frozen=True)
class Strategy:
    """One strategy file. A sink is named after its strategy."""

    name: str
    idea: str
    survives: str
    costs: str
    choose: str
    sql: str
    start: Literal["positions", "earliest"] = "positions"
    """Where a sink without checkpoint begins: at its positions, or, like a plain consumer, at the earliest event."""
    takes: Literal["amounts", "states"] = "amounts"
    """What it takes of an event: what that adds, or the state that it brings, which makes up for any before it."""
    knows: Literal["events", "positions"] = "events"
    """What it knows an event by: itself or its place, or only how far the sink has read. One of the latter would take
    the replay of a dead letter for a re-read, so it is not asked about one: the letter alone says that it is new."""


def load(folder: Path) -> dict[str, Strategy]:
    """The strategies of a folder, by name. Raises Failure for a file without its header."""
    return {file.stem: _read(file) for file in sorted(folder.glob("*.sql"))}


def _read(file: Path) -> Strategy:
    sql = file.read_text()
    header = dict(re.findall(r"^-- (\w+): (.+)$", sql, re.MULTILINE))
    missing = [word for word in REQUIRED if word not in header]
    if missing:
        raise Failure(f"{file}: its first comments do not say: {', '.join(missing)}", "write them as `-- idea: …`")
    told: dict[str, Any] = {word: header[word] for word in REQUIRED}
    told |= {word: other for word, other in OTHERWISE.items() if header.get(word) == other}
    return Strategy(name=file.stem, sql=sql, **told)
