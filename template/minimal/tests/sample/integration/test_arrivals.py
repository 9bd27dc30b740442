"""An arrival: its row and its event are written together, once, or not at all."""

from __future__ import annotations

import uuid

import pytest
from flask import Flask

from outbox.base.settings import Settings, SinkRole
from outbox.events import catalog
from tests.sample.conftest import Client
from tests.support.outbox_records import as_records, deliver
from tests.support.queries import query
from tests.support.threads import all_at_once

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
    _, event = as_records(databases)
    assert (event["key"], event["headers"]["eventType"]) == (depot, "received")
    assert event["value"] == {
        "arrival_id": made["id"],
        "depot_id": depot,
        "count": 4,
        "version": 2,
        "occurred_at": made["occurred_at"],
    }


def test_every_event_is_valid(client: Client, databases: Settings) -> None:
    client.arrive(str(uuid.uuid4()), 1)
    client.arrive(str(uuid.uuid4()), 1_000_000, traceparent=TRACEPARENT)
    found = as_records(databases)
    assert [one["headers"]["traceparent"] for one in found] == [None, TRACEPARENT]
    schema = catalog.of(databases).schema("depot", "received", 1)
    for one in found:
        schema.require_valid(one["value"])


def test_the_sink_counts_each_event_once(client: Client, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    client.arrive(depot, 3)
    client.arrive(depot, 4)
    for _ in range(2):
        deliver(databases, as_records(databases), "depots")
    assert query(databases, "SELECT depot_id::text, parcels FROM depot_parcels", SinkRole.OWNER) == [(depot, 7)]


def test_a_repeated_request_is_recorded_once(client: Client, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    first, second = (client.arrive(depot, 3, key="a-key") for _ in range(2))
    assert (first.status_code, first.get_json()) == (second.status_code, second.get_json())
    assert client.arrive(depot, 4, key="a-key").status_code == 409
    assert depots(databases) == {depot: (3, 1)}
    assert len(as_records(databases)) == 1


@pytest.mark.parametrize("count", [0, -1, 1_000_001, 1.0, "1", None])
def test_a_count_that_is_none_is_refused(client: Client, databases: Settings, count: object) -> None:
    assert client.arrive(str(uuid.uuid4()), count).status_code == 422
    assert depots(databases) == {}
    assert as_records(databases) == []


def test_arrivals_at_the_same_moment_all_count(app: Flask, databases: Settings) -> None:
    depot = str(uuid.uuid4())
    answers = all_at_once(8, lambda _: Client(app, databases).arrive(depot, 1))
    assert [answer.status_code for answer in answers] == [201] * 8
    assert depots(databases) == {depot: (8, 8)}
    assert sorted(one["value"]["version"] for one in as_records(databases)) == [1, 2, 3, 4, 5, 6, 7, 8]
