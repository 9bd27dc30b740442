"""The projection: a SQL file that applies what is in ``fresh``, and says whether it needs the events of a key in order.

One that adds up does not. One for which the later event must not come before the earlier has a line in its header:

    -- ordered by: account_id, version

the columns of the key and of the number that counts its events. Then an event is parked as long as an earlier one of
its key waits among the dead letters: it becomes a dead letter itself, and is replayed behind the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from psycopg2 import extensions, sql

PARKED = "parked"
# Blockers are open letters, but for those that are being replayed now, and what was refused in this transaction. A
# record that could not be read has no version: what lies behind it in its partition came after it.
PARK = """
INSERT INTO rejected (event_id, reason, detail)
SELECT DISTINCT ON (fresh.event_id) fresh.event_id, %(reason)s, format('behind %%s', blocker.identity)
  FROM fresh
  JOIN (SELECT identity, coalesce(key, convert_to(event ->> {key_name}, 'UTF8')) AS key,
               (event ->> {version_name})::bigint AS version, partition, "offset"
          FROM dead_letters
         WHERE sink = %(sink)s AND status = 'open'
           AND NOT EXISTS (SELECT FROM staged WHERE staged.event_id::text = identity)
         UNION ALL
        SELECT event_id::text, convert_to(event ->> {key_name}, 'UTF8'), (event ->> {version_name})::bigint, partition,
               "offset"
          FROM refused) AS blocker
    ON blocker.key = convert_to(fresh.{key}::text, 'UTF8')
   AND CASE WHEN blocker.version IS NULL
            THEN (fresh.partition, fresh."offset") > (blocker.partition, blocker."offset")
            ELSE fresh.{version} > blocker.version END
 ORDER BY fresh.event_id, blocker.partition, blocker."offset"
"""


class Order(NamedTuple):
    """The columns of ``staged`` that say which events come one after the other."""

    key: str
    version: str


@dataclass(frozen=True)
class Projection:
    """One projection file."""

    sql: str
    order: Order | None


def load(file: Path) -> Projection:
    """Read a projection."""
    text = file.read_text()
    declared = re.search(r"^-- ordered by: (\w+), (\w+)$", text, re.MULTILINE)
    return Projection(text, Order(*declared.groups()) if declared else None)


def park(cursor: extensions.cursor, sink: str, order: Order) -> None:
    """Put into ``rejected`` what is in ``fresh`` and must wait for an earlier event of its key."""
    statement = sql.SQL(PARK).format(
        key=sql.Identifier(order.key),
        version=sql.Identifier(order.version),
        key_name=sql.Literal(order.key),
        version_name=sql.Literal(order.version),
    )
    cursor.execute(statement, {"sink": sink, "reason": PARKED})
