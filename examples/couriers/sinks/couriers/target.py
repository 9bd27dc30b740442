"""The table `couriers`, by courier."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from outbox.targets import newest

from sinks import store

PUT = "INSERT INTO delivery.couriers (courier, name, zone, parcels) VALUES (?, ?, ?, ?) USING TIMESTAMP ?"
DELETE = "DELETE FROM delivery.couriers USING TIMESTAMP ? WHERE courier = ?"
TOTALS = "SELECT courier, parcels, writetime(parcels) FROM delivery.couriers"


def write(events: pa.Table) -> None:
    """Write the newest event of each courier in a batch."""
    store.write(
        (PUT, (one["courier"], one["name"], one["zone"], one["parcels"], one["version"]))
        if one["event_type"] == "courier.moved"
        else (DELETE, (one["version"], one["courier"]))
        for one in newest(events, key="courier", version="version").to_pylist()
    )


def totals() -> Iterator[tuple[str, int, int]]:
    """What `outbox check` compares: courier, parcels, version."""
    return store.read(TOTALS)


def erase(key: str, topic: str, *, dry_run: bool) -> int:
    """Erase a courier. Of equal timestamps the deletion wins."""
    del topic
    rows = list(store.read(f"{TOTALS} WHERE courier = ?", key))
    if not dry_run:
        store.write((DELETE, (version, key)) for _, _, version in rows)
    return len(rows)
