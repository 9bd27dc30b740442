"""A car enters or leaves: the garage's row and the event are written together, once, or not at all."""

from __future__ import annotations

import pytest
from outbox import Settings
from outbox_lab.testing import Application, SinkRole, all_at_once, deliver, outbox_records, query
from outbox_lab.testing.contract import test_sinks_keep_their_contract  # noqa: F401

from tests.conftest import Client


def written(settings: Settings) -> list[tuple[str, str, int]]:
    """Type, car and version of each event."""
    records = outbox_records(settings)
    return [(one["headers"]["eventType"], one["value"]["car"], one["value"]["version"]) for one in records]


def test_a_car_that_enters_and_leaves_is_two_events(client: Client, databases: Settings) -> None:
    assert client.pass_by("enter").get_json() == {"garage": "north", "cars": 1, "version": 1}
    assert client.pass_by("leave").get_json() == {"garage": "north", "cars": 0, "version": 2}
    assert written(databases) == [("entered", "ZH 1", 1), ("left", "ZH 1", 2)]
    assert client.get("/garages/north").get_json() == {"garage": "north", "cars": 0, "version": 2}
    assert client.get("/garages/south").status_code == 404


def test_a_full_garage_refuses_and_the_refusal_is_stored(client: Client, databases: Settings) -> None:
    assert [client.pass_by("enter").status_code for _ in range(3)] == [200] * 3
    refused = client.pass_by("enter", key="k")
    assert (refused.status_code, refused.get_json()["type"]) == (409, "/problems/garage-full")
    client.pass_by("leave")
    assert client.pass_by("enter", key="k").data == refused.data
    assert len(written(databases)) == 4


def test_a_repeated_request_is_applied_once(client: Client, databases: Settings) -> None:
    first, second = (client.pass_by("enter", key="k") for _ in range(2))
    assert (first.status_code, first.data) == (second.status_code, second.data)
    assert query(databases, "TABLE garages") == [("north", 1, 1)]
    assert client.pass_by("enter", car="ZH 2", key="k").status_code == 409


@pytest.mark.parametrize("garage", ["", "North", 7, None])
def test_an_invalid_garage_is_refused(client: Client, databases: Settings, garage: str) -> None:
    assert client.pass_by("enter", garage=garage).status_code == 422
    assert written(databases) == []


def test_the_last_places_are_given_once(app: Application, databases: Settings) -> None:
    answers = all_at_once(8, lambda _: Client(app, databases).pass_by("enter").status_code)
    assert sorted(answers) == [200] * 3 + [409] * 5
    assert query(databases, "TABLE garages") == [("north", 3, 3)]


def test_the_page_of_the_api_shows_the_headers_of_a_change(client: Client) -> None:
    described = client.get("/openapi.json").get_json()["paths"]["/enter"]["post"]
    assert {(one["in"], one["name"]) for one in described["parameters"]} == {
        ("header", "Idempotency-Key"),
        ("header", "traceparent"),
    }


def test_the_sink_counts_each_event_once(client: Client, databases: Settings) -> None:
    for way in ("enter", "enter", "leave"):
        client.pass_by(way)
    for _ in range(2):
        deliver(databases, outbox_records(databases), "garages")
    assert query(databases, "SELECT garage, cars FROM garage_cars", SinkRole.OWNER) == [("north", 1)]
