"""The offsets that Connect stores for a connector, as records of its topics.

Connect's own request (DELETE /connectors/NAME/offsets) fails for a connector with its own offsets topic on a worker
with exactly-once: it commits its transaction before it has written to both topics (seen with Connect 4.3.1: "Cannot
add partition … while in state READY").
"""

from __future__ import annotations

import json

from confluent_kafka import Producer

from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.kafka import records, topics
from outbox.kafka.clients import client_config, request_timeout_s
from outbox.relay.connectors import Connector


def delete(settings: Settings, connector: Connector) -> None:
    """Delete the stored offsets of a connector, which must not run.

    Connect keeps a copy in the worker's topic beside the connector's own. Each entry in both is deleted by a tombstone.
    An interrupted deletion can be repeated.
    """
    producer = Producer({**client_config(settings), "acks": "all"})
    for topic in topics.existing(settings, [connector.offsets_topic, settings.connect_offsets_topic]):
        for key in _stored(settings, topic, connector):
            producer.produce(topic, key=key, value=None)
    if producer.flush(request_timeout_s()):
        raise Failure("Kafka did not delete the stored offsets", "run the command again", code="offsets-kept")


def _stored(settings: Settings, topic: str, connector: Connector) -> list[bytes]:
    """The keys of the connector's entries that are not deleted yet."""
    stored: dict[bytes, bool] = {}
    for message in records.read(settings, topic, topics.watermarks(settings, topic)):
        key = message.key()
        if isinstance(key, bytes) and _owner(key) == connector.name:
            stored[key] = message.value() is not None
    return [key for key, has_value in stored.items() if has_value]


def _owner(key: bytes) -> str | None:
    """The connector of an entry. Its key is JSON: the connector's name and the source's partition."""
    try:
        return str(json.loads(key)[0])
    except (ValueError, LookupError, TypeError):
        return None
