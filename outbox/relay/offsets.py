"""The offsets that Connect stores for a connector, as records of its topics: how to make it forget them.

Connect's own way (DELETE /connectors/NAME/offsets) fails for a connector with an offsets topic of its own on a worker
with exactly-once: it commits its transaction before it has written to both topics (seen with Connect 4.3.1: "Cannot
add partition … while in state READY").
"""

from __future__ import annotations

import json

from confluent_kafka import Producer

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.relay import connectors
from outbox.relay.connectors import Connector


def forget(settings: Settings, connector: Connector | None = None) -> int:
    """Delete what is stored for the connector, which must not run, and return how many entries that was.

    Connect keeps a copy in the worker's topic beside the connector's own; both are cleared, each entry by a tombstone.
    Cut off anywhere, it can be run again.
    """
    connector = connector or connectors.load(settings)
    cleared = 0
    producer = Producer({**topics.client_config(settings), "acks": "all"})
    for topic in (connector.offsets_topic, settings.connect_offsets_topic):
        stored: dict[bytes, bool] = {}
        for message in topics.read(settings, topic, topics.watermarks(settings, topic)):
            key = message.key()
            if isinstance(key, bytes) and _connector(key) == connector.name:
                stored[key] = message.value() is not None
        for key in (key for key, is_there in stored.items() if is_there):
            producer.produce(topic, key=key, value=None)
            cleared += 1
    if producer.flush(topics.TIMEOUT_S):
        raise Failure("Kafka did not take the deletion of the stored offsets", "run it again")
    return cleared


def _connector(key: bytes) -> str | None:
    """The connector that an entry belongs to: its key is JSON, the connector's name and the source's partition."""
    try:
        return str(json.loads(key)[0])
    except (ValueError, LookupError, TypeError):
        return None
