"""The ids of topics while somebody reads them: a topic that is deleted and made again has another one.

A reader asks for offsets by the name of a topic, so it would go on at its offset in the new topic, and skip what that
has below.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient

from outbox.base.settings import Settings
from outbox.kafka.clients import client_config, kafka_errors, request_timeout_s

EVERY_S = 5.0


class TopicIds:
    """Asks for the ids of topics every few seconds, one small request for all of them. Nobody waits for the answer."""

    def __init__(self, settings: Settings, names: Collection[str]) -> None:
        self._names = TopicCollection([*names])
        with kafka_errors(settings):
            self._client = AdminClient({**client_config(settings), "log_level": 0})
        self._asked: Mapping[str, Future[Any]] = {}
        self._due_at = time.monotonic() + EVERY_S

    def look(self) -> dict[str, str]:
        """The ids that have come since the last look, by name. A topic that does not exist now is left out, and so are
        all of them if Kafka does not answer.
        """
        found = {}
        if self._asked and all(request.done() for request in self._asked.values()):
            found = {name: str(one.result().topic_id) for name, one in self._asked.items() if one.exception() is None}
            self._asked = {}
        if not self._asked and time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + EVERY_S
            self._asked = self._client.describe_topics(self._names, request_timeout=request_timeout_s())
        return found
