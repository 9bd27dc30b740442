"""A change of an account, as Debezium tells it: the row before and after, what was done, and where in the log.

Nothing in it is an id, so one is made of what tells changes apart: table, primary key, LSN and op. A dead letter is
known by it, as one of an event by the event's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator

from outbox.base import project
from outbox.sink.verdict import Header, Judging, Verdict, parse, violation

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SCHEMA_FILE = project.current().connect / "events" / "account-change.v1.schema.json"
KEY = "account_id"
ROW = "struct<id string, currency string, balance_minor bigint, version bigint>"
ENVELOPE = f"struct<op string, before struct<id string>, after {ROW}, source struct<table string, lsn bigint>>"
OPS = ("r", "c", "u", "d")


def changes(records: DataFrame) -> DataFrame:
    """Decode changes of accounts: valid ones with the columns of staged.sql, others with their ``record``.

    What is surely valid passes; about the rest `Judge` is asked. A record that tells table, key, LSN and op has an
    ``event_id`` even if it is not valid.
    """
    from pyspark.sql import functions as F  # noqa: N812 - Spark, which a replay of dead letters does without

    from outbox.sink.decode import FAST_UUID, KEPT, UUID_LENGTH, all_of, kept_unless, parsed

    change, is_whole = parsed("value", ENVELOPE)
    key, is_whole_key = parsed("key", "struct<id string>")
    taken = records.select(
        *KEPT,
        "partition",
        "offset",
        change.alias("_change"),
        is_whole.alias("_is_whole"),
        key["id"].alias("_key"),
        is_whole_key.alias("_is_whole_key"),
    )
    op, table, lsn = F.col("_change.op"), F.col("_change.source.table"), F.col("_change.source.lsn")
    is_deleted = op == "d"
    account_id = F.when(is_deleted, F.col("_change.before.id")).otherwise(F.col("_change.after.id"))

    def row(column: str) -> Column:
        return F.when(~is_deleted, F.col(f"_change.after.{column}"))

    is_known = all_of(
        op.isin(*OPS), table == "accounts", lsn >= 0, account_id.rlike(FAST_UUID), F.length(account_id) == UUID_LENGTH
    )
    currency = row("currency")
    valid = all_of(
        F.col("_is_whole"),
        F.col("_is_whole_key"),
        F.is_valid_utf8(F.col("value").cast("string")),
        is_known,
        is_deleted | all_of(currency.rlike("^[A-Z]{3}$"), F.length(currency) == 3, row("version") >= 0),  # noqa: PLR2004
        is_deleted | row("balance_minor").isNotNull(),
        F.col("_key") == account_id,
    )
    return taken.select(
        F.when(is_known, _id(table, account_id, lsn.cast("string"), op)).alias("event_id"),
        "partition",
        "offset",
        table.alias("table_name"),
        account_id.alias(KEY),
        op.alias("op"),
        lsn.alias("lsn"),
        currency.alias("currency"),
        row("balance_minor").alias("balance_minor"),
        row("version").alias("version"),
        kept_unless(valid),
    )


class Judge(Judging):
    """Says what is wrong with a record of a change, by JSON Schema, and that its key is the row's."""

    key = KEY

    def __init__(self) -> None:
        self._schema = Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))

    def judge(
        self, key: bytes | None, headers: Sequence[Header], value: bytes | None, recorded_ms: int
    ) -> Verdict | dict[str, Any]:
        """What is wrong with a record, or, if nothing is, the columns of its change."""
        del headers, recorded_ms  # a change has none, and its place in the log is no time
        change, fault = parse(value)
        fault = fault or violation(self._schema, change)
        if fault:
            return fault
        row = change["before" if change["op"] == "d" else "after"]
        told, fault = parse(key)
        if fault or not isinstance(told, dict) or told.get("id") != row["id"]:
            return Verdict("key mismatch", "the record's key is not that of its row")
        state = ("currency", "balance_minor", "version")
        return {
            "table_name": change["source"]["table"],
            KEY: row["id"],
            "op": change["op"],
            "lsn": change["source"]["lsn"],
            **{name: None if change["op"] == "d" else row[name] for name in state},
        }


def _id(*parts: Column) -> Column:
    """A UUID made of these; null if one is null."""
    from pyspark.sql import functions as F  # noqa: N812

    digest = F.md5(F.concat(*(column for part in parts for column in (part, F.lit("|")))))
    places = ((1, 8), (9, 4), (13, 4), (17, 4), (21, 12))
    return F.concat_ws("-", *(F.substring(digest, start, length) for start, length in places))
