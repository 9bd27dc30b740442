"""Size of an event on disk: in the outbox, on the topic, and as an id that a sink remembers."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime

from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.kafka import topics
from outbox.relay import connectors
from outbox.sink.remembering import strategy

from bench import relay
from bench.event import topic

EVENTS = 50_000
OUTBOX_BYTES = "SELECT pg_total_relation_size('outbox') / count(*) FROM outbox"
REMEMBER = "INSERT INTO processed_events (sink, event_id) SELECT 'balances', uuidv7() FROM generate_series(1, %s)"
IDS_BYTES = """
SELECT sum(pg_total_relation_size(inhrelid)) FROM pg_inherits WHERE inhparent = 'processed_events'::regclass
"""


def measure(settings: Settings) -> dict[str, int]:
    """Bytes per event, with indexes; on the topic as the relay writes them, without replicas."""
    relay.relay(settings, connectors.load(settings), EVENTS, report=lambda _: None)
    records = sum(topics.last_stable_offsets(settings, topic(settings)).values())
    segments = settings.home.glob(f"kafka/**/{topic(settings)}-*/*.log")
    found = {"topic": sum(segment.stat().st_size for segment in segments) // records}
    with closing(connect(settings, SourceRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(OUTBOX_BYTES)
        ((found["outbox"],),) = cursor.fetchall()
    with closing(connect(settings, SinkRole.WRITER)) as connection:
        strategy.ensure_partitions(connection, {datetime.now(UTC).date()})
    with closing(connect(settings, SinkRole.OWNER)) as connection, connection.cursor() as cursor:
        cursor.execute(REMEMBER, [EVENTS])
        cursor.execute(IDS_BYTES)
        ((ids_bytes,),) = cursor.fetchall()
        found["id"] = int(ids_bytes) // EVENTS
    return found
