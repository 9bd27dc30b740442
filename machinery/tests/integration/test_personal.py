"""Messages of the sink database, and details of a projection, repeat no personal data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg2
import pytest

from outbox.base.database import reason_of
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole
from outbox.sink.decoding.records import Record
from outbox_lab.testing import query
from tests.seen import Seen, create_tables
from tests.support.declared import TOML, Events, payload
from tests.support.declared_sinks import record

TOPIC = "shop.order"
MARKER = '5f0c"a\n2-b1'
PERSONAL = {
    "name": {"type": "string", "x-personal": True},
    "note": {"type": "string"},
}
REFUSING = """
-- [refuse]
INSERT INTO rejections SELECT event_id, 'unwelcome', format('as %s', {}) FROM new_events;
-- [apply]
SELECT 1;
"""


def order(number: int = 1, **more: Any) -> Record:
    return record("placed", {"id": "a", "number": number, **more})


def seen(settings: Settings, folder: Path, projection: str) -> Seen:
    create_tables(settings)
    known = Events(folder / "events").aggregate("order", TOML, placed_v1=payload(PERSONAL)).load()
    return Seen(settings, folder, known, ["order"], projection=projection.replace("%s", "%%s"))


@pytest.mark.parametrize("type_", ["int", "bigint", "uuid", "timestamptz", "date", "jsonb", "numeric", "boolean"])
def test_a_failed_cast_repeats_no_value(databases: Settings, tmp_path: Path, type_: str) -> None:
    casting = seen(databases, tmp_path, f"SELECT name::{type_} FROM new_events")
    with pytest.raises(Failure) as failed:
        casting.apply(TOPIC, order(name=MARKER))
    assert failed.value.code == "database-refused"
    assert not any(part in str(failed.value) for part in ("5f0c", "2-b1")), failed.value


def test_other_messages_of_the_database_are_whole(databases: Settings) -> None:
    with pytest.raises(psycopg2.Error) as failed:
        query(databases, 'SELECT "no column"', SinkRole.OWNER)
    assert reason_of(failed.value) == 'column "no column" does not exist'


@pytest.mark.parametrize("detail", ["name", "note"])
def test_the_detail_of_a_refusal_is_hidden(databases: Settings, tmp_path: Path, detail: str) -> None:
    refusing = seen(databases, tmp_path, REFUSING.replace("{}", detail))
    assert refusing.apply(TOPIC, order(name="5f0c", note="late")).rejected == 1
    assert refusing.letters("reason", "detail") == [("unwelcome", "not shown: the sink takes personal data")]


def test_a_property_that_only_an_older_version_has_is_personal_too(databases: Settings, tmp_path: Path) -> None:
    refusing = seen(databases, tmp_path, REFUSING.replace("{}", "note"))
    events = Events(tmp_path / "events").aggregate("order", TOML, placed_v2=payload({"note": {"type": "string"}}))
    events.write("order/upcast.py", "def placed_v1(payload):\n    raise ValueError(payload['name'])\n")
    refusing.deploy("order", known=events.load())
    assert refusing.spec.is_personal
    assert refusing.apply(TOPIC, order(name="5f0c")).dead == 1
    assert refusing.letters("detail") == [("placed_v1: ValueError",)]
