"""The strategies: SQL files, each a way to recognise duplicates.

A strategy reads the temporary table ``outbox_batch`` and inserts what is new into ``new_events`` (same columns), in the
transaction that applies. It may remember what it has seen in its own tables. It may put events of the batch into
``rejections`` (event_id, reason, detail) in place of ``new_events``; they become dead letters.

A strategy may have two sections. ``-- [select]`` is all of that; ``-- [remember]`` runs once rejected events have left
``new_events``, for a strategy that must not remember them. Without sections all of the file selects. What a strategy
without ``-- [remember]`` knows of a rejected event stays: the event's dead letter says that it is not applied.

The line ``-- memory: TABLE by COLUMNS`` says which rows of which table are what it remembers, or ``none``: `Memory`.
Retention, rebuilds, `outbox check` and the soak take that from there, whosever strategy it is.

A batch has events of one topic, and maybe of several types: what a strategy may rely on is ``event_id``, ``partition``,
``offset``, and the columns ``{key}`` and ``{version}`` of the key and the version. ``%(sink)s`` is the sink's name,
``%(topic)s`` and ``%(topic_id)s`` are the topic's; a literal percent sign is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from outbox.base.errors import Failure
from outbox.base.sections import COMMENT, sql_sections

if TYPE_CHECKING:
    from psycopg2 import extensions

BUILT_IN = Path(__file__).with_name("strategies")
OPTIONS = {
    "start": ("positions", "earliest"),
    "knows": ("events", "positions"),
    "takes": ("events", "states"),
    "repeats": ("all", "re-reads", "none"),
}
LINE = re.compile(r"^--[ \t]*(\w+)[ \t]*:[ \t]*(.*?)[ \t]*$", re.MULTILINE)
MEMORY = re.compile(r"([a-z_][a-z0-9_]*) by (event_id|key versions?|topic_id partition offset|(?:\w+ )*lsn(?: \w+)*)")
PARTITIONED = "processed_events"  # by the days of its ids: partitions are made before the transaction that needs them


@dataclass(frozen=True)
class Memory:
    """A strategy's memory in the sink database: rows of a table, which has a column ``sink`` too.

    ``by`` are the columns by which it knows an event or a change:

    - ``event_id``. Retention forgets the ids below the deduplication horizon, and the strategy must set those aside.
    - ``key``, ``version``: the highest version of each key; ``key``, ``versions``: all of them, as an int8multirange.
      The table has a column ``topic`` too. Nothing is forgotten.
    - ``topic_id``, ``partition``, ``offset``: the place of each event. Retention forgets what a topic has dropped.
    - several with ``lsn``: changes of captured tables. Retention forgets those that neither the log nor the topic has.
    """

    table: str
    by: tuple[str, ...]

    @property
    def is_of_ids(self) -> bool:
        """Whether it knows events by their ids."""
        return self.by == ("event_id",)

    @property
    def is_of_keys(self) -> bool:
        """Whether it knows events by key and version."""
        return self.by in {("key", "version"), ("key", "versions")}

    @property
    def is_of_places(self) -> bool:
        """Whether it knows events by their places on a topic."""
        return self.by == ("topic_id", "partition", "offset")

    @property
    def is_of_changes(self) -> bool:
        """Whether it knows changes of captured tables."""
        return "lsn" in self.by

    @property
    def is_partitioned(self) -> bool:
        """Whether it needs the partitions of processed_events."""
        return self.table == PARTITIONED


@dataclass(frozen=True)
class Strategy:
    """One strategy file."""

    name: str
    memory: Memory | None
    """The strategy's memory; None if that is nothing in the sink database but its positions."""
    select: str
    remember: str = ""
    start: Literal["positions", "earliest"] = "positions"
    """Where a sink without checkpoint begins: at its positions, or, like a plain consumer, at the earliest event."""
    takes: Literal["events", "states"] = "events"
    """Whether projections apply each event, or the newest state, which supersedes the states before it."""
    knows: Literal["events", "positions"] = "events"
    """Whether the strategy recognises an event by the event itself or its place, or only by positions. The latter
    cannot recognise the event of a dead letter, so a replay takes such an event for new: its dead letter is open."""
    repeats: Literal["all", "re-reads", "none"] = "all"
    """The repeated events that the strategy recognises: all, or those read again at their offsets, or none."""

    @property
    def remembers_ids(self) -> bool:
        """Whether it needs the partitions of processed_events."""
        return self.memory is not None and self.memory.is_partitioned

    @property
    def needs_version(self) -> bool:
        """Whether the job's events must be numbered by key."""
        return "{version}" in self.select + self.remember

    @property
    def rejects(self) -> bool:
        """Whether it may reject events itself."""
        return "rejections" in self.select


def load(folder: Path) -> dict[str, Strategy]:
    """The strategies of a folder, by name.

    Raises Failure for a file whose header or sections have a typing mistake.
    """
    return {file.stem: _read(file) for file in sorted(folder.glob("*.sql"))}


def find(strategy: str | Path) -> Strategy:
    """The built-in strategy of a name, or the strategy in a file. Raises Failure if it is missing, and as `load`."""
    if isinstance(strategy, Path):
        if not strategy.is_file():
            raise Failure(f"there is no strategy {strategy}", "correct the job's strategy", code="strategy-unusable")
        return _read(strategy)
    known = load(BUILT_IN)
    if strategy not in known:
        raise Failure(
            f"no strategy is called {strategy}",
            f"there are {', '.join(known)}; one of yours is a file: strategy=Path('mine.sql')",
            code="strategy-unusable",
        )
    return known[strategy]


def _read(file: Path) -> Strategy:
    header = dict(LINE.findall(file.read_text()))
    options: dict[str, Any] = _options(file, header)
    sections = sql_sections(file, "select", "remember")
    select, remember = sections["select"], sections.get("remember", "")
    memory = _memory(file, header.get("memory", ""), COMMENT.sub("", select + remember))
    return Strategy(name=file.stem, memory=memory, select=select, remember=remember, **options)


def _memory(file: Path, value: str, statements: str) -> Memory | None:
    """Raises Failure if it cannot be the memory of these statements."""
    if value == "none":
        return None
    found = MEMORY.fullmatch(value)
    if found is None:
        raise Failure(
            f"{file}: its header does not say what it remembers: `memory: {value}`",
            "write `-- memory: TABLE by event_id`, `… by key version`, `… by key versions`, "
            "`… by topic_id partition offset`, or `-- memory: none`",
            code="strategy-unusable",
        )
    memory = Memory(found[1], tuple(found[2].split()))
    if not re.search(rf"\b{memory.table}\b", statements):
        raise Failure(
            f"{file}: its header says that it remembers in {memory.table}, and its SQL does not name that table",
            "correct the line `-- memory: …`",
            code="strategy-unusable",
        )
    if memory.is_of_ids and "dedup_horizon" not in statements:
        raise Failure(
            f"{file}: it remembers ids, and does not look at dedup_horizon: ids below it are forgotten",
            "let it set events below the horizon aside, as `dedup` does",
            code="strategy-unusable",
        )
    return memory


def _options(file: Path, header: Mapping[str, str]) -> dict[str, str]:
    found = {word: header[word] for word in OPTIONS if word in header}
    for word, value in found.items():
        if value not in OPTIONS[word]:
            raise Failure(
                f"{file}: its header has an unknown value, `{word}: {value}`",
                f"write {' or '.join(f'`-- {word}: {known}`' for known in OPTIONS[word])}, or delete the line",
                code="strategy-unusable",
            )
    return found


def ensure_partitions(connection: extensions.connection, wanted: Collection[date]) -> None:
    """Make the missing partitions of processed_events that events of these days need. Days below the horizon need none.

    It commits its own transactions, so call it before the one that applies. Each makes at most 50 partitions, which
    takes some 400 locks. The days near today get a partition each and older ones a partition per month, so that a batch
    with ids of fifty years needs some 700 partitions. Inserting takes two locks per partition; a default Postgres has
    room for 6,400 (max_locks_per_transaction 64, max_connections 100).

    A partition is only dropped when the horizon is at or above its end. So if one of these is gone when the batch is
    applied, its events are below the horizon, where the strategy sets them aside.
    """
    is_complete = not wanted
    while not is_complete:
        with connection, connection.cursor() as cursor:
            cursor.execute("SELECT public.ensure_processed_events(%s::date[])", [sorted(wanted)])
            ((is_complete,),) = cursor.fetchall()
