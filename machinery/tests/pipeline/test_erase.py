"""Erasing keys on the whole chain: refused before the relay, gone afterwards, and not brought back by any re-read."""

from __future__ import annotations

import json

from outbox.audit import check
from outbox.base.settings import Settings, SinkRole
from outbox.maintenance import erase
from outbox.relay import arrivals
from outbox_lab.testing import query, run
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.chain import relaying
from tests.orders import MOMENT
from tests.support import outbox_rows
from tests.support.made_events import nth_key
from tests.support.outbox_rows import Row

KEY, OTHER, ITEM, OTHER_ITEM = (nth_key(number) for number in (81, 82, 83, 84))
STORY = "0b7c9a44-my-neighbour-has-seen-the-parcel"
TIMEOUT_S = 120.0


def placed(key: str) -> Row:
    payload = {"order_id": key, "item_id": nth_key(85), "quantity": 1, "version": 1, "occurred_at": MOMENT}
    return Row("order", key, "placed", json.dumps(payload))


def cancelled(key: str, version: int, reason: str) -> Row:
    payload = {"order_id": key, "reason": reason, "version": version, "occurred_at": MOMENT}
    return Row("order", key, "cancelled", json.dumps(payload))


def found(settings: Settings, aggregate: str, key: str) -> dict[str, int]:
    """Where there is anything of a key."""
    report = outbox("erase", aggregate, key, "--check", "--json", home=settings.home, **settings.as_env()).stdout
    return {place: rows for place, rows in json.loads(report)["found"].items() if rows}


def output(settings: Settings, *words: str, status: int = 0) -> str:
    """All that a command has printed, its log too."""
    done = outbox(*words, home=settings.home, **settings.as_env())
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_erased_keys_stay_erased(topic: Settings) -> None:
    outbox_rows.insert(topic, *(row for key in (KEY, OTHER) for row in (placed(key), cancelled(key, 2, STORY))))
    outbox_rows.insert(topic, cancelled(KEY, 3, STORY * 10))  # longer than its schema allows
    outbox_rows.insert(topic, outbox_rows.row(ITEM), outbox_rows.row(OTHER_ITEM))
    query(topic, f"INSERT INTO orders VALUES ('{KEY}', 3), ('{OTHER}', 2)")
    query(topic, f"INSERT INTO items VALUES ('{ITEM}', 'KGM', 5, 1), ('{OTHER_ITEM}', 'KGM', 5, 1)")
    with raises("events-not-on-topic"):
        erase.erase(topic, erase.subject(topic, "order", KEY))
    with relaying(topic):
        assert arrivals.all_arrive(topic, [], TIMEOUT_S)
        shown = [output(topic, "sink", "orders", "activity", "lakehouse", "--until-caught-up")]
        report = check.check(topic)
        assert [one.code for one in report.findings] == ["malformed-records", "sink-parked", "sink-parked"]
        shown += [output(topic, "check", status=1), output(topic, "check", "--json", status=1)]
        shown += [run(topic, "dead-letters", "list"), run(topic, "dead-letters", "list", "--json")]

        of_order = {"outbox": 3, "dead letters": 2, "orders.erase.sql of sink orders": 1}
        assert found(topic, "order", KEY) == of_order
        assert found(topic, "item", ITEM) == {"outbox": 1, "table of sink lakehouse": 1}
        for aggregate, key in (("order", KEY), ("item", ITEM)):
            run(topic, "erase", aggregate, key, "--check", status=1)
            shown.append(run(topic, "erase", aggregate, key, "--yes"))
            shown.append(run(topic, "erase", aggregate, key, "--check"))
        assert all(f"topic {topic.topic_prefix}.{name}: until 2" in "".join(shown) for name in ("order", "item"))

        run(topic, "rebuild", "orders", "--from", "topic", "--yes")
        run(topic, "rewind", "lakehouse", "--to-earliest", "--yes")
        run(topic, "sink", "lakehouse", "--until-caught-up")
        assert found(topic, "order", KEY) == found(topic, "item", ITEM) == {}
        orders = "SELECT order_id::text, reason FROM orders"
        assert query(topic, orders, SinkRole.OWNER) == [(OTHER, STORY)]
        assert found(topic, "item", OTHER_ITEM)["table of sink lakehouse"] == 1
        assert check.check(topic).findings == []
    assert [text for text in shown if STORY in text] == []
    logs = [file for file in (topic.home / "logs").rglob("*") if file.is_file()]
    assert len(logs) >= 3
    assert [file for file in logs if STORY.encode() in file.read_bytes()] == []
