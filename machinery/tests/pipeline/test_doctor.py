"""Each hop broken on purpose: the doctor finds it, names a remedy, and continues with the next hop."""

from __future__ import annotations

import shutil
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

from outbox.audit.doctor import HOPS, Diagnosis, examine
from outbox.base.database import connect
from outbox.base.settings import Settings, SinkRole, SourceRole
from outbox.base.wait import wait_for
from outbox.kafka import clients, topics
from outbox.kafka.clients import client_config
from outbox.maintenance import retention
from outbox.migrations.declared import declared, guard
from outbox.migrations.migrate import owner_engine
from outbox.relay import connectors, lifecycle
from outbox.sink import discovery
from outbox.sink.repair import rebuild
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import outbox
from tests.support import kept_rows, suite, topic_sinks
from tests.support.declared import declare, work_for
from tests.support.made_events import NOW_MS, uuid7
from tests.support.outbox_rows import insert, row
from tests.support.sink_driver import sink_on
from tests.support.topic_reader import delete_topics, relayed, topic_of


def problems(settings: Settings) -> dict[str, list[str]]:
    """The codes of the problems by hop; every hop was looked at."""
    found = list(examine(settings))
    assert {diagnosis.hop for diagnosis in found} == set(HOPS)
    codes: dict[str, list[str]] = {}
    for diagnosis in found:
        if not diagnosis.is_ok:
            codes.setdefault(diagnosis.hop, []).append(diagnosis.code)
    return codes


def diagnosed(settings: Settings, code: str) -> Diagnosis:
    """The diagnosis with this code."""
    (found,) = (diagnosis for diagnosis in examine(settings) if diagnosis.code == code)
    return found


@contextmanager
def changed(postgres: Postgres, do: str, undo: str, dbname: str = "postgres") -> Iterator[None]:
    postgres.psql(do, dbname)
    try:
        yield
    finally:
        postgres.psql(undo, dbname)


def test_sound_chain_has_no_problems_and_each_fault_is_found(shared_chain: Settings, postgres: Postgres) -> None:
    """One chain for every fault that can be undone: a connector costs seconds."""
    chain = shared_chain
    insert(chain, row())
    relayed(chain)
    wait_for("the slot to be read", lambda: not problems(chain), timeout_s=30)
    app, writer = chain.role_name(SourceRole.APP), chain.role_name(SinkRole.WRITER)

    with changed(postgres, f"ALTER ROLE {app} SUPERUSER", f"ALTER ROLE {app} NOSUPERUSER"):
        assert problems(chain) == {"source-db": ["role-too-wide"]}

    with changed(postgres, f"ALTER ROLE {writer} NOLOGIN", f"ALTER ROLE {writer} LOGIN"):
        [found] = [diagnosis for diagnosis in examine(chain) if not diagnosis.is_ok]
    assert (found.hop, writer in found.message) == ("sink-db", True)

    other = chain.replace(topic_retention_hours=1, topic_partitions=5, exactly_once=False)
    assert {hop: sorted(codes) for hop, codes in problems(other).items()} == {
        "kafka": ["partitions-differ", "topic-config-differs", "topic-config-differs"],
        "connector": ["delivery-differs"],
    }
    wider = diagnosed(other, "partitions-differ")
    assert wider.message == f"topic {topic_of(chain)} has 4 partitions, 5 are declared"
    assert "aggregate.toml, or OUTBOX_TOPIC_PARTITIONS, to 4" in str(wider.remedy)


def test_declared_events_that_were_not_migrated_or_applied_are_found(
    shared_chain: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = shared_chain
    wait_for("the slot to be read", lambda: not problems(chain), timeout_s=30)
    events = work_for(tmp_path / "newer", monkeypatch)
    shutil.copytree(suite.DOMAIN / "events", events)
    declare(events, "bill")
    declare(events, "claim", topic=f"{chain.connector}-claims")
    found = problems(chain)
    assert found == {
        "source-db": ["schema-behind", "events-undeclared"],
        "connector": ["routes-differ"],
        "kafka": ["topic-missing", "topic-missing"],
    }
    assert "bill.changed.v1, claim.changed.v1" in diagnosed(chain, "events-undeclared").message
    assert diagnosed(chain, "events-undeclared").remedy == "`outbox migrate`"
    assert diagnosed(chain, "routes-differ").remedy == "`outbox connect apply`"
    guard(owner_engine(chain, "source"), declared(chain))
    lifecycle.apply(chain)
    wait_for("no problems", lambda: not problems(chain), timeout_s=30)


def test_unread_and_missing_slots_are_found(shared_chain: Settings) -> None:
    """This test runs last, because it removes the connector."""
    lifecycle.remove(shared_chain)
    wait_for("the slot to be released", lambda: problems(shared_chain).get("slot") == ["slot-unread"], timeout_s=30)
    assert "connector-not-running" in problems(shared_chain)["connector"]
    lifecycle.remove(shared_chain, drop_slot=True)
    assert problems(shared_chain)["slot"] == ["slot-missing"]


def test_what_is_unavailable_does_not_hide_the_rest(topic: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(problems(topic))
    done = outbox("doctor", home=topic.home, **topic.as_env())
    assert (done.returncode, "problems found" in done.stderr) == (1, True)
    assert f"FIX slot      there is no slot {topic.connector}" in done.stdout
    assert "ok  source-db " in done.stdout
    with monkeypatch.context() as patched:
        patched.setattr(clients, "REQUEST_TIMEOUT_S", 1.0)  # three hops wait for a broker that never answers
        for setting, value, hops in (
            ("kafka_bootstrap", "127.0.0.1:1", {"kafka", "sinks", "retention"}),
            ("connect_url", "http://127.0.0.1:1", {"connector"}),
            ("sink_db_url", topic.sink_db_url.replace(port=1), {"sink-db", "sinks", "retention"}),
            ("source_db_url", topic.source_db_url.replace(port=1), {"source-db", "slot", "retention"}),
        ):
            assert set(problems(topic.replace(**{setting: value}))) - before == hops - before, setting
    delete_topics(topic, topic_of(topic, "order"))
    both, other = ["topic-config-differs", "topic-missing"], topic.replace(topic_retention_hours=1)
    wait_for("it to be gone", lambda: problems(other).get("kafka") == both, timeout_s=10)
    topics.create(topic, connectors.topic_specs(topic))


def test_sinks_that_do_not_run_or_are_beyond_the_topic_are_found(topic: Settings) -> None:
    item, order = (topics.describe(topic, topic_of(topic, name)) for name in ("item", "order"))
    producer = Producer(client_config(topic))
    for _ in range(3):
        producer.produce(item.name, b"{}", partition=0)
    producer.flush(30)
    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection, name="gone").begin_at({item.name: {0: 0}}, {item.name: item.id})
    assert "sinks" not in problems(topic)
    assert diagnosed(topic, "sink-undeclared").message.startswith("sink gone ")

    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at({item.name: {0: 1}}, {item.name: item.id})
        assert "sinks" not in problems(topic), "it has a driver"
        with rebuild.reserved(topic, "dedup") as owner:
            rebuild.begin(owner, "dedup", [item], {item.name: topics.first_offsets(topic, item.name)})
            assert problems(topic)["sinks"] == ["rebuild-unfinished"]
            rebuild.drop_copy(owner, "dedup")
    wait_for("the driver to be gone", lambda: "sinks" in problems(topic), timeout_s=10)
    assert problems(topic)["sinks"] == ["sink-not-running"]
    assert "2 offsets behind" in diagnosed(topic, "sink-not-running").message
    with closing(connect(topic, SinkRole.WRITER)) as connection:
        sink_on(connection).begin_at({item.name: {0: 9}}, {item.name: item.id})
        assert problems(topic)["sinks"] == ["topic-recreated"]
        kept_rows.stand(topic, "activity", item.name, item.id)
        kept_rows.stand(topic, "activity", order.name, order.id, offset=7)
        assert any(f"offset 7 of {order.name}, partition 0" in one.message for one in examine(topic, "sinks"))
        less = 'UPDATE sinks SET asked_for = \'{"strategy": "dedup", "topics": {}}\' WHERE name = \'activity\''
        kept_rows.query(topic, less)
        kept_rows.query(topic, "INSERT INTO skipped_events VALUES ('activity', %s, 'order.placed.v1')", order.name)
        assert diagnosed(topic, "job-changed").message.startswith("sink activity")


@pytest.mark.usefixtures("whole_day")
def test_unlimited_topic_and_too_old_outbox_are_found(topic: Settings, postgres: Postgres) -> None:
    old = uuid7(Random(1), NOW_MS - 9 * 24 * 60 * 60 * 1000)  # noqa: S311
    columns = "id, aggregatetype, aggregateid, type, payload"
    insert_old = f"INSERT INTO outbox ({columns}) VALUES ('{old}', 'item', 'b', 'received', '{{}}')"
    postgres.psql(insert_old, topic.source_db_url.name)
    assert "retention" not in problems(topic)
    retention.drop(topic, datetime.now(UTC).date() - timedelta(days=5))
    assert problems(topic)["retention"] == ["outbox-older-than-horizon"]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic_of(topic, "order"))
    resource.add_incremental_config(ConfigEntry("retention.ms", "-1", incremental_operation=AlterConfigOpType.SET))
    admin = AdminClient(client_config(topic))
    admin.incremental_alter_configs([resource])[resource].result(10)
    both = ["outbox-older-than-horizon", "topic-unlimited"]
    wait_for("the topic to be unlimited", lambda: problems(topic)["retention"] == both, timeout_s=10)
    assert topic_of(topic, "order") in diagnosed(topic, "topic-unlimited").message


@pytest.mark.parametrize(("dated_by", "codes"), [("CreateTime", ["topic-config-differs"]), ("LogAppendTime", [])])
def test_a_target_topic_that_the_clock_of_the_sink_dates_is_found(
    topic: Settings, monkeypatch: pytest.MonkeyPatch, dated_by: str, codes: list[str]
) -> None:
    jobs = topic_sinks.jobs(topic)
    monkeypatch.setattr(discovery, "jobs", lambda _: jobs)
    with topic_sinks.target_topics(topic, **{"message.timestamp.type": dated_by}):
        kept_rows.start(topic, "copies")
        assert problems(topic).get("sinks", []) == codes
        remedies = [str(one.remedy) for one in examine(topic, "sinks") if not one.is_ok]
    assert all(f"{topic_sinks.copies_of(topic)} --add-config message.timestamp.type=" in one for one in remedies)
