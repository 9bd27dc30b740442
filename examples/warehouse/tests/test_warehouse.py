"""Each event once, each order at its newest version: in DuckDB and Snowflake. BigQuery parses the same statements."""

from __future__ import annotations

import multiprocessing
import os
import signal
import uuid
from typing import Any

import pyarrow as pa
import pytest
import sqlglot
from outbox import Settings
from outbox_lab.testing import SinkRole, deliver, query
from outbox_lab.testing.contract import contract
from sqlglot import ErrorLevel, exp

from sinks.warehouse import target

test_sinks_keep_their_contract = contract(examples=2)


def order(version: int, cents: int, order_id: str = "a") -> dict[str, Any]:
    """A record as it is on the topic."""
    event_id = uuid.UUID(int=(1_764_000_000_000 << 80) + (7 << 76) + (2 << 62) + (ord(order_id) << 32) + version)
    headers = {"id": str(event_id), "eventType": "changed", "schemaVersion": "1"}
    value = {"order_id": order_id, "status": "open", "cents": cents, "version": version}
    value["occurred_at"] = "2026-11-21T10:00:00.123456Z"
    return {"topic": "shop.order", "key": order_id, "headers": headers, "value": value}


def die_behind_the_merge(settings: Settings, records: list[dict[str, Any]]) -> None:
    write = target.write

    def write_and_die(events: pa.Table) -> None:
        write(events)
        os.kill(os.getpid(), signal.SIGKILL)

    target.write = write_and_die
    deliver(settings, records, "warehouse")


def test_a_kill_between_merge_and_commit_repeats_nothing(databases: Settings) -> None:
    records = [order(1, 100), order(2, 250)]
    process = multiprocessing.get_context("fork").Process(target=die_behind_the_merge, args=(databases, records))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert target.totals() == [("a", 250, 2)], "the warehouse has the batch"
    assert query(databases, "SELECT FROM positions", SinkRole.OWNER) == [], "and the sink database does not know of it"
    assert deliver(databases, records, "warehouse").applied == 2
    assert target.totals() == [("a", 250, 2)]
    assert target.erase("a", "shop.order", dry_run=True) == 3


@pytest.mark.filterwarnings("ignore:Arrow output on a DB-API result")  # fakesnow's, of DuckDB 2
def test_snowflake_has_what_duckdb_has(snowflake_account: None, databases: Settings) -> None:
    deliver(databases, [order(2, 250), order(1, 70, "b")], "warehouse")
    deliver(databases, [order(1, 100), order(2, 250)], "warehouse")
    assert sorted(target.totals()) == [("a", 250, 2), ("b", 70, 1)], "an older version replaces none"
    assert target.erase("a", "shop.order", dry_run=False) == 3
    assert target.totals() == [("b", 70, 1)]


@pytest.mark.parametrize("statement", [target.MERGE_EVENTS, target.MERGE_ORDERS])
def test_bigquery_parses_the_statements(statement: str) -> None:
    """No emulator of BigQuery is in reach, so they run in the other two alone."""
    [parsed] = sqlglot.parse(statement, dialect="bigquery", error_level=ErrorLevel.RAISE)
    assert isinstance(parsed, exp.Merge)
    [rendered] = sqlglot.transpile(statement, "snowflake", "bigquery", unsupported_level=ErrorLevel.RAISE)
    assert rendered.replace(" NULLS FIRST", "").lower() == parsed.sql("bigquery").lower()
