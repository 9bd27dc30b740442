"""Each hop broken on purpose: the doctor finds it, says what to do, and goes on looking behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # not said in its stubs
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from outbox.audit.doctor import HOPS, Finding, examine
from outbox.base.database import connect as connect_database
from outbox.base.settings import Settings, SinkRole
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.maintenance import retention
from outbox.relay import apply as relay
from outbox.sink.repair import rebuild, rewind
from outbox.stack.postgres import Postgres
from tests.command import outbox
from tests.relay import insert, relayed, row
from tests.sink import NOW_MS, sink_on, uuid7


def wrong(settings: Settings) -> dict[str, list[Finding]]:
    """What is to do, by hop; every hop was looked at."""
    found = list(examine(settings))
    assert {finding.hop for finding in found} == set(HOPS)
    sick = [finding for finding in found if not finding.is_well]
    return {hop: [finding for finding in sick if finding.hop == hop] for hop in HOPS if any(f.hop == hop for f in sick)}


def the_one(settings: Settings, hop: str) -> str:
    """The one finding there is, which is of this hop."""
    (only,) = (finding for findings in wrong(settings).values() for finding in findings)
    assert only.hop == hop
    return f"{only.text} — {only.remedy}"


@contextmanager
def changed(postgres: Postgres, do: str, undo: str, dbname: str = "postgres") -> Iterator[None]:
    postgres.psql(do, dbname)
    try:
        yield
    finally:
        postgres.psql(undo, dbname)


def test_a_chain_that_is_well_is_told_so_and_each_thing_that_is_not(chain: Settings, postgres: Postgres) -> None:
    """One chain for all that can be undone: a connector costs seconds."""
    insert(chain, row())
    relayed(chain)
    wait_for("the slot to be read", lambda: not wrong(chain), timeout_s=30)

    with changed(postgres, "ALTER ROLE ledger_app SUPERUSER", "ALTER ROLE ledger_app NOSUPERUSER"):
        told = [finding.text for finding in wrong(chain)["ledger"]]
    assert "role ledger_app is a superuser" in told
    assert "ledger_app may SELECT, UPDATE, DELETE, TRUNCATE events" in told

    grant, revoke = "GRANT SELECT ON outbox TO ledger_app", "REVOKE SELECT ON outbox FROM ledger_app"
    with changed(postgres, grant, revoke, chain.source_db_name):
        assert the_one(chain, "ledger") == "ledger_app may SELECT events — REVOKE SELECT ON outbox FROM ledger_app"

    with changed(postgres, "ALTER ROLE balances_writer NOLOGIN", "ALTER ROLE balances_writer LOGIN"):
        assert "balances_writer" in the_one(chain, "balances")

    behind = chain.model_copy(update={"topic_retention_hours": 1})
    assert f"topic {chain.topic} has retention.ms=604800000, not 3600000" in the_one(behind, "kafka")

    other_mode = chain.model_copy(update={"exactly_once": False})
    assert "in force is exactly-once" in the_one(other_mode, "connector")


def test_a_schema_that_is_behind(topic: Settings, postgres: Postgres) -> None:
    postgres.psql("DELETE FROM alembic_version WHERE version_num LIKE '%domain%'", topic.sink_db_name)
    (finding,) = wrong(topic)["balances"]
    assert (finding.text, finding.remedy) == ("the schema is behind this code", "`outbox migrate`")


def test_a_slot_that_nobody_reads_and_one_that_is_gone(chain: Settings) -> None:
    relay.remove(chain)
    wait_for("the slot to be let go of", lambda: "nobody reads" in wrong(chain)["slot"][0].text, timeout_s=30)
    assert "it is MISSING" in wrong(chain)["connector"][0].text
    relay.remove(chain, drop_slot=True)
    assert "there is no slot" in wrong(chain)["slot"][0].text


def test_a_publication_that_is_gone(topic: Settings, postgres: Postgres) -> None:
    postgres.psql("DROP PUBLICATION outbox", topic.source_db_name)
    (finding,) = wrong(topic)["slot"]
    assert "has no publication" in finding.text
    assert finding.remedy == "`outbox migrate`"


@pytest.mark.parametrize(
    ("setting", "value", "hops"),
    [
        ("kafka_bootstrap", "127.0.0.1:1", {"kafka", "sinks", "retention"}),
        ("connect_url", "http://127.0.0.1:1", {"connector"}),
        ("sink_db_port", 1, {"balances", "sinks", "retention", "clocks"}),
        ("source_db_port", 1, {"ledger", "slot", "retention", "clocks"}),
    ],
)
def test_what_cannot_be_reached_does_not_hide_the_rest(
    topic: Settings, setting: str, value: object, hops: set[str]
) -> None:
    well = set(wrong(topic))
    assert set(wrong(topic.model_copy(update={setting: value}))) - well == hops - well


def test_sinks_without_driver_behind_and_beyond_the_topic(topic: Settings) -> None:
    producer = Producer(client_config(topic))
    for _ in range(3):
        producer.produce(topic.topic, b"{}", partition=0)
    producer.flush(30)
    of_topic = topics.describe(topic, topic.topic).id

    def told() -> str:
        (finding,) = wrong(topic)["sinks"]
        return finding.text

    with closing(connect_database(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at(topic.topic, of_topic, {0: 1})
        assert "sinks" not in wrong(topic), "it has a driver"
    wait_for("the driver to be gone", lambda: "sinks" in wrong(topic), timeout_s=10)
    assert told() == "sink dedup has no driver; it is 2 offsets behind"
    with closing(connect_database(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at(topic.topic, of_topic, {0: 9})
        assert "offset 9 of partition 0, which the topic does not have" in told()


def test_a_copy_that_was_never_swapped_in(topic: Settings) -> None:
    described = topics.describe(topic, topic.topic)
    with closing(connect_database(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at(topic.topic, described.id, {0: 0})
        with rebuild.reserved(topic, "dedup") as owner:
            rebuild.begin(owner, "dedup", described, topics.first_offsets(topic, topic.topic))
        (finding,) = wrong(topic)["sinks"]
    assert finding.text == "dedup.rebuild is a copy that was never swapped in"


def test_a_topic_that_keeps_everything_and_an_outbox_below_the_floor(topic: Settings, postgres: Postgres) -> None:
    assert "retention" not in wrong(topic)
    old = uuid7(Random(1), NOW_MS - 9 * 24 * 60 * 60 * 1000)  # noqa: S311
    postgres.psql(
        f"INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload) VALUES ('{old}', 'a', 'b', 'c', '{{}}')",
        topic.source_db_name,
    )
    assert "retention" not in wrong(topic)
    retention.drop(topic, datetime.now(UTC).date() - timedelta(days=5))
    (finding,) = wrong(topic)["retention"]
    assert "the outbox has events from below the floor" in finding.text
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic.topic)
    resource.add_incremental_config(ConfigEntry("retention.ms", "-1", incremental_operation=AlterConfigOpType.SET))
    admin = AdminClient(client_config(topic))
    admin.incremental_alter_configs([resource])[resource].result(10)
    wait_for("the topic to keep all", lambda: len(wrong(topic)["retention"]) == 2, timeout_s=10)
    assert "processed_events can never shrink" in wrong(topic)["retention"][1].text


def test_a_checkpoint_is_compared_with_the_positions_if_it_is_here(topic: Settings, tmp_path: Path) -> None:
    topic = topic.model_copy(update={"sink_checkpoints": f"file://{tmp_path}/check points"})
    with closing(connect_database(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at(topic.topic, topics.describe(topic, topic.topic).id, {0: 2, 1: 0})

    def commit(batch: int, offset: int, ending: str = '{"nextBatchWatermarkMs":0}') -> None:
        planned = json.dumps({topic.topic: {"1": 0, "0": offset}})
        for log, text in (("offsets", f'v1\n{{"batchWatermarkMs":0}}\n{planned}'), ("commits", f"v1\n{ending}")):
            file = tmp_path / "check points" / "dedup" / log / str(batch)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def told(settings: Settings = topic) -> list[Finding]:
        return [finding for finding in examine(settings) if "checkpoint" in finding.text]

    elsewhere = "s3a://bucket/checkpoints"
    (finding,) = told(topic.model_copy(update={"sink_checkpoints": elsewhere}))
    assert finding.is_well
    assert f"{elsewhere}/dedup, where nobody has looked" in finding.text

    (finding,) = told()
    assert finding.is_well
    assert "has no checkpoint in" in finding.text

    for batch, offset in ((8, 0), (9, 1), (10, 2)):
        commit(batch, offset)
        (finding,) = told()
        assert (finding.is_well, finding.text) == (True, "the checkpoint of sink dedup is not ahead of its database")
    commit(11, 3, ending="")
    assert told() == [finding], "cut off: the sink removes it"

    commit(11, 3)
    (finding,) = told()
    assert finding.remedy == "`outbox rewind --sink dedup --to-positions`"
    assert "at offset 3 of partition 0 by its checkpoint, and its database is at 2" in finding.text

    rewind.rewind(topic, "dedup", rewind.to_positions(topic, "dedup"))
    (finding,) = told()
    assert finding.is_well
    assert "has no checkpoint in" in finding.text


def test_the_command_tells_it_all_and_ends_with_1(topic: Settings) -> None:
    names = {
        "OUTBOX_SOURCE_DB_NAME": topic.source_db_name,
        "OUTBOX_SINK_DB_NAME": topic.sink_db_name,
        "OUTBOX_TOPIC": topic.topic,
        "OUTBOX_CONNECTOR": topic.connector,
    }
    plain = outbox("doctor", home=topic.home, **names)
    assert plain.returncode == 1
    assert f"FIX slot      there is no slot {topic.connector}" in plain.stdout
    assert "ok  ledger    no role has more than it needs" in plain.stdout
    assert "findings want something done" in plain.stderr
    listed = json.loads(outbox("doctor", "--json", home=topic.home, **names).stdout)
    assert {finding["hop"] for finding in listed} == set(HOPS)
