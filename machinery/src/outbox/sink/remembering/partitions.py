"""The partitions of processed_events: what a batch needs is made before the transaction that applies the batch."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date

from psycopg2 import extensions


def ensure(connection: extensions.connection, wanted: Collection[date]) -> None:
    """Make the partitions that events of these days need and that do not exist; days below the horizon need none.

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
