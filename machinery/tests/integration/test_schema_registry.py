"""`outbox events publish` to a real registry: what it gets, what stays as it is, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from outbox_lab.testing.homes import Homes
from tests.support.declared import EXAMPLE, payload
from tests.support.event_project import TOML, Repository
from tests.support.schema_registry import TIMEOUT_S, Apicurio

COMMON = {"$defs": {"label": {"type": "string", "maxLength": 9}}}
LABEL = {"label": {"$ref": "../common.schema.json#/$defs/label"}}


@pytest.fixture(scope="module")
def server(homes: Homes) -> Iterator[Apicurio]:
    """A registry that refuses what is not backward compatible."""
    made = Apicurio(homes.new("registry"))
    made.start()
    answer = requests.put(f"{made.url}/config", json={"compatibility": "BACKWARD"}, timeout=TIMEOUT_S)
    assert answer.ok, answer.text
    yield made
    made.stop()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A project with topics of its own: four versions of events on two topics, and one that is not published."""
    made = Repository(tmp_path / "project")
    made.write("pyproject.toml", TOML.replace("shop", f"shop-{tmp_path.name}"))
    made.events.write("common.schema.json", COMMON)
    made.events.aggregate(
        "order", placed_v1=payload(examples=[EXAMPLE]), placed_v2=payload(LABEL, ("label",)), paid_v1=payload()
    )
    made.events.aggregate("refund", given_v1=payload())
    made.events.aggregate("draft", 'key = "id"\npublished = false\n', made_v1=payload())
    return made


def published(server: Apicurio, repository: Repository) -> list[str]:
    """The subjects, without their prefix, of a run that publishes them all."""
    done = repository.run("publish", "--registry", server.url)
    assert (done.returncode, done.stderr) == (0, "note: draft is left out: published = false\n")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {status for status, _ in lines} == {"published"}
    return [subject.partition(".")[2] for _, subject in lines]


def subjects(server: Apicurio, repository: Repository) -> dict[str, list[Any]]:
    """The schemas of the subjects of a project, the oldest first."""

    def get(path: str) -> Any:
        return requests.get(f"{server.url}/subjects{path}", timeout=TIMEOUT_S).json()

    prefix = (repository.root / "pyproject.toml").read_text().partition('topic-prefix = "')[2].partition('"')[0]
    return {
        name: [json.loads(get(f"/{name}/versions/{version}")["schema"]) for version in get(f"/{name}/versions")]
        for name in sorted(get(""))
        if name.startswith(f"{prefix}.")
    }


NAMES = [
    "order-order.paid.v1",
    "order-order.placed.v1",
    "order-order.placed.v2",
    "refund-refund.given.v1",
]


def test_each_version_has_a_subject_and_a_second_run_changes_nothing(server: Apicurio, repository: Repository) -> None:
    assert published(server, repository) == NAMES
    found = subjects(server, repository)
    assert [name.partition(".")[2] for name in found] == NAMES
    assert [len(schemas) for schemas in found.values()] == [1, 1, 1, 1]
    # A reader of the registry has all that it needs: references lead to the document itself.
    [second] = found[next(name for name in found if name.endswith("placed.v2"))]
    assert second["title"] == "order.placed.v2"
    assert "examples" not in second
    assert second["$defs"]["common.schema.json"] == COMMON
    assert published(server, repository) == NAMES
    assert subjects(server, repository) == found


def test_an_edit_is_a_version_of_the_same_subject_unless_the_registry_refuses_it(
    server: Apicurio, repository: Repository
) -> None:
    published(server, repository)
    # An optional property: compatible to our readers, and not to this registry, as docs/events.md says.
    wider = payload({"label": {"type": "string"}})
    edited = payload(description="An order.", deprecated=True)
    repository.events.aggregate("order", paid_v1=wider, placed_v1=edited)
    done = repository.run("publish", "--registry", server.url)
    assert (done.returncode, repository.code) == (1, "schemas-refused"), done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == [*["published"] * 3, "refused"]
    line = done.stderr.splitlines()[-1]
    assert "refuses 1 schema; first: " in line
    assert "order.paid.v1: " in line
    assert "ncompatib" in line
    assert [len(schemas) for schemas in subjects(server, repository).values()] == [1, 2, 1, 1]
