"""How many columns of events one row of Postgres has room for.

Postgres keeps a row in one page of 8 kB. It moves long values out of the row, but only those of more than 24 bytes. So
a row of many short values may not fit, whatever their average length. The limits here hold for every value that the
columns can have, and leave room for the columns that a sink adds.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox.events.schema import Column, SqlType

# Aligned to 8 bytes. `tests/integration/test_wide_events.py` measures both limits on a real Postgres.
UUID_BYTES, VARYING_BYTES, OTHER_BYTES = 16, 24, 8
VARYING: set[SqlType] = {"text", "numeric", "jsonb"}
ROW_MAX_BYTES = 7680  # of 8160; the row's header, its bitmap of NULLs, and a sink's own columns take the rest
COLUMNS_MAX = 1500  # of 1600 that a table may have
LIMIT = (
    f"a row has room for {ROW_MAX_BYTES} bytes: {VARYING_BYTES} for each text, number without bounds or nested value, "
    f"{UUID_BYTES} for a uuid, {OTHER_BYTES} for any other"
)


def row_bytes(columns: Iterable[Column]) -> int:
    """How many bytes of a row the columns take at most, if none of them is NULL."""
    return sum(map(_bytes, columns))


def _bytes(column: Column) -> int:
    if column.type in VARYING:
        return VARYING_BYTES
    return UUID_BYTES if column.type == "uuid" else OTHER_BYTES
