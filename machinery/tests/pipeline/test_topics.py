"""The offsets of topics."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from outbox.base import wait
from outbox.base.settings import Settings
from outbox.kafka import topics
from outbox.kafka.spec import TopicSpec
from tests.support.topic_reader import delete_topics

PARTITIONS = 300  # so many that a broker knows the topic before it leads all of them


@pytest.mark.usefixtures("stack")
def test_a_new_topic_has_offsets_as_soon_as_it_exists(databases: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question after `create` was once answered "Not leader for partition"."""
    monkeypatch.setenv(wait.SCALE_VARIABLE, "6")  # a slow broker needs more than 10 s for so many partitions
    asked, searched = [f"{databases.topic_prefix}.{name}" for name in ("asked", "searched")]
    try:
        topics.create(databases, [TopicSpec(asked, PARTITIONS, {})])
        assert topics.high_watermarks(databases, asked) == dict.fromkeys(range(PARTITIONS), 0)
        topics.create(databases, [TopicSpec(searched, PARTITIONS, {})])
        assert topics.offsets_since(databases, searched, datetime.now(UTC)) == {}
    finally:
        delete_topics(databases, asked, searched)
