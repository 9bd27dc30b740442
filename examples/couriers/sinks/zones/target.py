"""The table `couriers_by_zone`. Its key changes with the courier's zone, so an event writes up to two rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from sinks import store

PUT = "INSERT INTO delivery.couriers_by_zone (zone, courier, parcels) VALUES (?, ?, ?) USING TIMESTAMP ?"
DELETE = "DELETE FROM delivery.couriers_by_zone USING TIMESTAMP ? WHERE zone = ? AND courier = ?"
TOTALS = "SELECT courier, parcels, writetime(parcels) FROM delivery.couriers_by_zone"
PLACES = "SELECT zone, writetime(parcels) FROM delivery.couriers_by_zone WHERE courier = ? ALLOW FILTERING"


def write(events: pa.Table) -> None:
    """Write the new events of a batch."""
    store.write(write for one in events.to_pylist() for write in writes(one))


def writes(event: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Delete the row of the zone before, unless the courier stays there: of equal timestamps the deletion wins."""
    courier, version, zone = event["courier"], event["version"], event["zone"]
    if event["left_zone"] not in (None, zone):
        yield DELETE, (version, event["left_zone"], courier)
    if zone is not None:
        yield PUT, (zone, courier, event["parcels"], version)


def totals() -> Iterator[tuple[str, int, int]]:
    """What `outbox check` compares: courier, parcels, version. A courier in two zones would have two rows."""
    return store.read(TOTALS)


def erase(key: str, topic: str, *, dry_run: bool) -> int:
    """Erase a courier. It reads the whole table, which a request of a person is worth."""
    del topic
    rows = list(store.read(PLACES, key))
    if not dry_run:
        store.write((DELETE, (version, zone, key)) for zone, version in rows)
    return len(rows)
