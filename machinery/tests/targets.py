"""Targets that are functions, over one file of SQLite: good ones, and one for each mistake."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from outbox.targets import newest

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "TARGET_FILE"  # the variable that names it
THIRTEEN = 13  # a quantity that some functions do not like
TABLES = """
CREATE TABLE IF NOT EXISTS movements (event_id PRIMARY KEY, item_id, quantity, version);
CREATE TABLE IF NOT EXISTS stock (item_id PRIMARY KEY, total, version);
"""


@contextmanager
def database() -> Iterator[sqlite3.Connection]:
    """The file, in a transaction."""
    with closing(sqlite3.connect(os.environ[FILE])) as connection, connection:
        connection.executescript("PRAGMA synchronous = off;" + TABLES)
        yield connection


def write(events: pa.Table) -> None:
    """Each event once, by its id."""
    rows = events.select(["event_id", "item_id", "quantity", "version"]).to_pylist()
    with database() as connection:
        statement = "INSERT INTO movements VALUES (:event_id, :item_id, :quantity, :version) ON CONFLICT DO NOTHING"
        connection.executemany(statement, rows)


def write_newest(events: pa.Table) -> None:
    """The newest state of each item."""
    rows = newest(events, key="item_id", version="version").to_pylist()
    with database() as connection:
        connection.executemany(
            """
            INSERT INTO stock VALUES (:item_id, :stock_after, :version)
            ON CONFLICT (item_id) DO UPDATE SET total = excluded.total, version = excluded.version
             WHERE excluded.version > stock.version
            """,
            rows,
        )


def totals() -> list[tuple[str, int, int]]:
    """By item its totals and versions, which are to be added up."""
    with database() as connection:
        return connection.execute(
            "SELECT item_id, quantity, version FROM movements UNION ALL SELECT item_id, total, version FROM stock"
        ).fetchall()


def found() -> dict[str, int]:
    """By item its total."""
    sums: dict[str, int] = {}
    for key, total, _ in totals():
        sums[key] = sums.get(key, 0) + total
    return sums


def erase(key: str, topic: str, *, dry_run: bool) -> int:
    """Remove an item."""
    del topic
    with database() as connection:
        movements = connection.execute("DELETE FROM movements WHERE item_id = ?", [key])
        stock = connection.execute("DELETE FROM stock WHERE item_id = ?", [key])
        if dry_run:
            connection.rollback()
    return movements.rowcount + stock.rowcount


def refuse(events: pa.Table) -> dict[str, str]:
    """Writes all but the events of one quantity."""
    rows = events.to_pylist()
    write(events.filter([row["quantity"] != THIRTEEN for row in rows]))
    return {row["event_id"]: "thirteen" for row in rows if row["quantity"] == THIRTEEN}


def fail(events: pa.Table) -> None:
    """Writes, and fails for one quantity."""
    write(events)
    if THIRTEEN in events["quantity"].to_pylist():
        raise ValueError(f"thirteen of {events['item_id'][0]}")


def leave(events: pa.Table) -> None:
    """Ends the process, as it thinks."""
    sys.exit(str(events.num_rows))


def count(events: pa.Table) -> int:
    """Returns what no target returns."""
    write(events)
    return len(events)


def refuse_others(events: pa.Table) -> dict[str, str]:
    """Refuses an event that it did not get."""
    del events
    return {"another": "none of ours"}


number = 1
