"""Example of docs/reference.md: a target's function."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from outbox.targets import newest

INDEX: dict[str, dict[str, Any]] = {}


def write(events: pa.Table) -> None:
    for order in newest(events, key="order_id", version="version").to_pylist():
        INDEX[order["order_id"]] = order


def test_a_batch_is_reduced_to_the_newest_version_of_each_key() -> None:
    events = pa.table(
        {
            "partition": [0, 0, 1, 0],
            "offset": [0, 1, 0, 2],
            "order_id": ["a", "a", "b", "a"],
            "version": [1, 3, 7, 2],
        }
    )
    write(events)
    assert {key: order["version"] for key, order in INDEX.items()} == {"a": 3, "b": 7}
    assert newest(events.slice(0, 0), key="order_id", version="version").num_rows == 0
