"""Functions that are no upsert on a stable key, over the file of `tests.targets`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.targets import newest
from tests.targets import database, erase, totals

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["add", "erase", "replace_any", "totals"]


def add(events: pa.Table) -> None:
    """Adds what an event adds, each time that it is called."""
    with database() as connection:
        connection.executemany(
            """
            INSERT INTO stock VALUES (:item_id, :version % 10, :version)
            ON CONFLICT (item_id) DO UPDATE SET total = stock.total + excluded.total,
                                                version = max(stock.version, excluded.version)
            """,
            events.to_pylist(),
        )


def replace_any(events: pa.Table) -> None:
    """Takes the newest of a batch, although the place may have a newer one."""
    rows = newest(events, key="item_id", version="version").to_pylist()
    with database() as connection:
        connection.executemany("INSERT OR REPLACE INTO stock VALUES (:item_id, :version, :version)", rows)
