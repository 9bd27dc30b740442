"""The sinks' writes, on a real Cassandra: repeated, late, in any order, beside foreign ones."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from cassandra import Unavailable
from cassandra.cluster import NoHostAvailable, Session
from outbox import Failure, Settings
from outbox_lab.testing import SinkRole, chosen_seed, deliver, outbox_records, query, seeded

from sinks import store
from sinks.couriers import target as couriers
from sinks.zones import target as zones
from tests.conftest import Service

BOTH = ("couriers", "zones")
EXPECTED = {"ada": ("west", 5), "bob": ("west", 1)}
REPLICAS = "ALTER KEYSPACE delivery WITH replication = {{'class': 'NetworkTopologyStrategy', 'datacenter1': {}}}"


@pytest.fixture
def events(service: Service, tables: Session) -> None:
    """Ada moves and stays, Bob moves and comes back, Cem signs off; they end as EXPECTED says."""
    service.move("ada", "north", 3)
    service.move("bob", "west", 2)
    service.move("cem", "north", 9)
    service.move("ada", "west", 4)
    service.move("bob", "north", 0)
    service.sign_off("cem")
    service.move("ada", "west", 5)
    service.move("bob", "west", 1)


def found(session: Session) -> tuple[dict[str, tuple[str, int]], dict[str, tuple[str, int]]]:
    """The rows of both tables, by courier."""
    by_courier = {row.courier: (row.zone, row.parcels) for row in session.execute("SELECT * FROM delivery.couriers")}
    by_zone = list(session.execute("SELECT * FROM delivery.couriers_by_zone"))
    assert len({row.courier for row in by_zone}) == len(by_zone), "a courier is in two zones"
    return by_courier, {row.courier: (row.zone, row.parcels) for row in by_zone}


def table_of(records: list[dict[str, Any]]) -> pa.Table:
    """Events as a sink's function gets them."""
    unset = {"partition": 0, "left_zone": None, "zone": None, "name": None, "parcels": None}
    return pa.Table.from_pylist(
        [
            {**unset, **one["value"], "event_type": f"courier.{one['headers']['eventType']}", "offset": offset}
            for offset, one in enumerate(records)
        ]
    )


@pytest.mark.usefixtures("events")
def test_each_event_counts_once_however_often_it_is_delivered(databases: Settings, tables: Session) -> None:
    for _ in range(2):
        for sink in BOTH:
            deliver(databases, outbox_records(databases), sink)
    assert found(tables) == (EXPECTED, EXPECTED)
    versions = [("ada", 5, 3), ("bob", 1, 3)]
    store.session().default_fetch_size = 1  # each row is a page
    assert [sorted(map(tuple, one.totals())) for one in (couriers, zones)] == [versions, versions]


@pytest.mark.usefixtures("events")
def test_the_same_events_in_any_order_and_repeated_give_the_same_rows(databases: Settings, tables: Session) -> None:
    """Without the sink database: what holds where nobody knows which events were written."""
    records = outbox_records(databases)
    chance = seeded(chosen_seed(), 0)
    for _ in range(5):
        for table in ("couriers", "couriers_by_zone"):
            tables.execute(f"TRUNCATE delivery.{table}")
        shuffled = chance.sample([*records, *records], 2 * len(records))
        for one in (couriers, zones):
            one.write(table_of(shuffled[:7]))
            one.write(table_of(shuffled[7:]))
        assert found(tables) == (EXPECTED, EXPECTED)


@pytest.mark.usefixtures("events")
def test_a_late_event_does_not_bring_back_what_was_deleted(databases: Settings, tables: Session) -> None:
    *_, cem_came, cem_left = [one for one in outbox_records(databases) if one["key"] == "cem"]
    for one in (couriers, zones):
        one.write(table_of([cem_left]))
        one.write(table_of([cem_came]))
    assert found(tables) == ({}, {})


@pytest.mark.usefixtures("events")
def test_a_write_with_the_time_as_timestamp_hides_every_later_event(databases: Settings, tables: Session) -> None:
    first, *later = [one for one in outbox_records(databases) if one["key"] == "ada"]
    deliver(databases, [first], "couriers")
    tables.execute("UPDATE delivery.couriers SET parcels = 100 WHERE courier = 'ada'")
    deliver(databases, later, "couriers")
    assert found(tables)[0] == {"ada": ("west", 100)}, "the zone follows the events, the parcels do not"
    [(courier, parcels, version)] = couriers.totals()
    assert (courier, parcels) == ("ada", 100)
    assert version > 10**15, "microseconds since 1970, and not a version: `check` sees it"


@pytest.mark.usefixtures("events")
def test_without_a_quorum_nothing_is_written_down_as_applied(databases: Settings, tables: Session) -> None:
    records = outbox_records(databases)
    tables.execute(REPLICAS.format(3))  # of which one is there
    with pytest.raises(Failure, match="NoHostAvailable") as failure:
        deliver(databases, records, "couriers")
    assert failure.value.code == "target-failed"
    assert isinstance(failure.value.__cause__, NoHostAvailable)
    assert [type(error) for error in failure.value.__cause__.errors.values()] == [Unavailable]
    assert query(databases, "SELECT * FROM positions", SinkRole.OWNER) == []
    tables.execute(REPLICAS.format(1))
    deliver(databases, records, "couriers")
    assert found(tables)[0] == EXPECTED


@pytest.mark.usefixtures("events")
def test_an_erased_courier_is_in_no_table(databases: Settings, tables: Session) -> None:
    for sink in BOTH:
        deliver(databases, outbox_records(databases), sink)
    assert [one.erase("ada", "couriers.courier", dry_run=True) for one in (couriers, zones)] == [1, 1]
    assert found(tables) == (EXPECTED, EXPECTED)
    assert [one.erase("ada", "couriers.courier", dry_run=False) for one in (couriers, zones)] == [1, 1]
    assert [one.erase("ada", "couriers.courier", dry_run=True) for one in (couriers, zones)] == [0, 0]
    rest = {"bob": EXPECTED["bob"]}
    assert found(tables) == (rest, rest)
