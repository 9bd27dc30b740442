"""A partition that no broker leads is waited for, and is not a transaction that does not end."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox.base.errors import Failure
from outbox.base.wait import WaitTimeoutError
from outbox.kafka import topics


def test_a_partition_without_a_leader_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))

    monkeypatch.setattr(topics, "REQUEST_TIMEOUT_S", 0.01)
    with pytest.raises(Failure) as raised:
        topics.ask_leaders("orders", ask)
    assert not isinstance(raised.value, WaitTimeoutError)
    assert raised.value.code == "kafka-unavailable"
