"""An arrival: its row and its event are written together, once, or not at all."""

from __future__ import annotations

import uuid

import pytest
from outbox import Settings
from outbox_lab.testing import (
    Application,
    SinkRole,
    all_at_once,
    deliver,
    differing_keys,
    outbox_records,
    query,
    rebuild,
)

from tests.conftest import Client

TRACEPARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


def depots(settings: Settings) -> dict[str, tuple[int, int]]:
    """Parcels and version of each depot."""
    return {str(depot): (parcels, version) for depot, parcels, version in query(settings, "TABLE depots")}


def test_an_arrival_adds_to_its_depot_and_writes_one_event(client: Client, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    client.arrive(depot, 3)
    response = client.arrive(depot, 4)
    assert response.status_code == 201
    made = response.get_json()
    assert depots(databases) == {depot: (7, 2)}
    _, event = outbox_records(databases)
    assert (event["key"], event["headers"]["eventType"]) == (depot, "received")
    assert event["value"] == {
        "arrival_id": made["id"],
        "depot_id": depot,
        "count": 4,
        "version": 2,
        "occurred_at": made["occurred_at"],
    }


def test_an_event_has_the_trace_of_its_request(client: Client, databases: Settings) -> None:
    client.arrive(str(uuid.uuid4()), 1)
    client.arrive(str(uuid.uuid4()), 1_000_000, traceparent=TRACEPARENT)
    found = outbox_records(databases)
    assert [one["headers"]["traceparent"] for one in found] == [None, TRACEPARENT]


def test_the_sink_counts_each_event_once(client: Client, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    client.arrive(depot, 3)
    client.arrive(depot, 4)
    for _ in range(2):
        deliver(databases, outbox_records(databases), "depots")
    assert query(databases, "SELECT depot_id::text, parcels FROM depot_parcels", SinkRole.OWNER) == [(depot, 7)]


def test_a_wrong_depot_is_found_and_set(client: Client, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    client.arrive(depot, 3)
    assert rebuild(databases, "depots") == {depot: {"parcels": (None, 3), "version": (None, 1)}}
    query(databases, "UPDATE depot_parcels SET parcels = 4", SinkRole.OWNER)
    assert differing_keys(databases, "depots") == {"depot_parcels": {depot}, "parcels": {depot}}
    assert rebuild(databases, "depots") == {depot: {"parcels": (4, 3)}}


def test_a_repeated_request_is_recorded_once(client: Client, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    first, second = (client.arrive(depot, 3, key="a-key") for _ in range(2))
    assert (first.status_code, first.get_json()) == (second.status_code, second.get_json())
    assert client.arrive(depot, 4, key="a-key").status_code == 409
    assert depots(databases) == {depot: (3, 1)}
    assert len(outbox_records(databases)) == 1


@pytest.mark.parametrize("count", [0, -1, 1_000_001, 1.0, "1", None])
def test_an_invalid_count_is_refused(client: Client, databases: Settings, count: object) -> None:
    assert client.arrive(str(uuid.uuid4()), count).status_code == 422
    assert depots(databases) == {}
    assert outbox_records(databases) == []


def test_arrivals_at_the_same_moment_all_count(app: Application, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    answers = all_at_once(8, lambda _: Client(app, databases).arrive(depot, 1))
    assert [answer.status_code for answer in answers] == [201] * 8
    assert depots(databases) == {depot: (8, 8)}
    assert sorted(one["value"]["version"] for one in outbox_records(databases)) == [1, 2, 3, 4, 5, 6, 7, 8]
