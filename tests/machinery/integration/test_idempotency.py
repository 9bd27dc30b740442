"""Idempotency-Keys on a real Postgres."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine

from outbox.base.settings import Settings, SourceRole
from outbox.base.wait import wait_for
from outbox.http.database import make_engine
from outbox.http.idempotency import Answer, Key, first_answer
from tests.support.queries import query


@pytest.fixture
def engine(databases: Settings) -> Iterator[Engine]:
    """Connections like the service's."""
    engine = make_engine(databases)
    yield engine
    engine.dispose()


def test_a_request_waits_for_another_with_its_key_and_takes_the_key_if_that_one_is_rolled_back(
    databases: Settings, engine: Engine
) -> None:
    key = Key("POST /movements", "k", b"hash", ttl_hours=1)

    def ask() -> Answer:
        with engine.begin() as connection:
            return first_answer(connection, key, Answer(201, "second"))

    with engine.connect() as first, ThreadPoolExecutor(1) as pool:
        assert first_answer(first, key, Answer(201, "first")) == Answer(201, "first")
        second = pool.submit(ask)
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        wait_for("the second to wait", lambda: query(databases, waiting, SourceRole.APP), timeout_s=10)
        first.rollback()
        assert second.result(10) == Answer(201, "second")
