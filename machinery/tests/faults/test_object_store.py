"""The sink `lakehouse` with its table and its checkpoint in S3."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from outbox.audit import check
from outbox.base.settings import Settings
from outbox.sink.applying.lakehouse import table
from tests.fixtures.object_store import BUCKET, ObjectStore
from tests.support.sink_driver import Database
from tests.support.sink_process import Publisher, catch_up_alone, logged, running, wait_applied

pytestmark = pytest.mark.cluster

NAME = "lakehouse"
TIMEOUT_S = 300


@pytest.fixture
def stored(topic: Settings, object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A topic whose sinks keep all that they have in S3."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    return topic.model_copy(
        update={
            "sink_lakehouse": f"s3a://{BUCKET}/{topic.topic_prefix}/tables",
            "sink_checkpoints": f"s3a://{BUCKET}/{topic.topic_prefix}/checkpoints",
            "spark_properties": object_store.write_properties(tmp_path / "spark.properties"),
        }
    )


def test_a_killed_sink_continues_from_its_checkpoint_in_s3(stored: Settings, publisher: Publisher) -> None:
    some, database = publisher.events(420), Database(stored, NAME)
    publisher.send(some[:200])
    with running(stored, NAME) as sink:
        wait_applied(sink, database, 200, TIMEOUT_S)
        publisher.send(some[200:400])
        wait_applied(sink, database, 201, TIMEOUT_S)
        sink.kill()
    publisher.send(some[400:])
    again = catch_up_alone(stored, NAME)
    assert again.returncode == 0, again.stderr
    [started] = logged(again, "started")
    assert started["checkpoint"] == f"{stored.sink_checkpoints}/{NAME}"
    assert int(str(logged(again, "applied")[0]["batch"])) > 0, "a query without its checkpoint begins with batch 0"
    uri = table.location(stored, NAME)
    ids = DeltaTable(uri).to_pyarrow_table(columns=["event_id"])["event_id"].to_pylist()
    assert sorted(ids) == sorted(event.event_id for event in some)
    [state] = [one for one in check.check(stored).sinks if one.name == NAME]
    assert state.not_compared == ""
