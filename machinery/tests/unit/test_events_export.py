"""`outbox events export`: the AsyncAPI document by the specification's own schema."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox.base.errors import Failure
from outbox.base.project import Project
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.references import pointed_at
from outbox.events.schema import EventSchema
from outbox_lab.events import asyncapi
from outbox_lab.events.expansion import expanded
from tests.support.declared import EXAMPLE, PROJECT, Events, Repository, payload
from tests.support.made_schemas import DOCUMENTS, value
from tests.support.paths import ROOT

SPECIFICATION = ROOT / "tests" / "support" / "asyncapi" / "3.0.0.json.gz"
COMMON = {
    "$defs": {
        "sku": {"type": "string", "pattern": "^[A-Z]+$"},
        "part/one": {"type": "object", "required": ["sku"], "properties": {"sku": {"$ref": "#/$defs/sku"}}},
        "tree": {"type": "object", "properties": {"below": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
    }
}
SHARED = "../common.schema.json#/$defs"
# Of draft 2020-12, and each in other words in draft 7; two events have a `line` of their own.
PLACED = payload(
    {
        "sku": {"$ref": f"{SHARED}/sku", "description": "What was ordered.", "maxLength": 3},
        "part": {"$ref": f"{SHARED}/part~1one"},
        "tree": {"$ref": f"{SHARED}/tree"},
        "pair": {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        "line": {"$ref": "#/definitions/line"},
        "again": {"$ref": "#/properties/pair"},
        "any": {"$ref": "#/definitions/any"},
        "who": {"enum": ["Ada", "Bob", "Ada"], "x-personal": True},
    },
    dependentRequired={"sku": ["part"]},
    dependentSchemas={"pair": {"required": ["line"]}},
    definitions={"line": {"type": "object", "required": ["cents"]}, "any": True},
    examples=[EXAMPLE, {**EXAMPLE, "tree": {"below": [{"below": []}]}, "who": "Ada"}],
)
PAID = payload(
    {"line": {"$ref": "#/definitions/line"}, "lines": {"items": {"$ref": "#/definitions/line"}}},
    definitions={"line": {"type": "string"}},
    deprecated=True,
    examples=[EXAMPLE, {"number": 1}, "no object"],
)
PAYLOADS: list[dict[str, Any]] = [
    {"sku": "AB"},
    {"sku": "AB", "part": {"sku": "A"}},
    {"sku": "ABCD", "part": {"sku": "A"}},
    {"part": {"sku": "a"}},
    {"part": {}},
    {"tree": {"below": [{"below": [{"below": 1}]}]}},
    {"pair": ["a", 1]},
    {"pair": ["a", 1], "line": {"cents": 1}},
    {"pair": ["a", "b"], "line": {"cents": 1}},
    {"pair": ["a", 1, 2], "line": {"cents": 1}},
    {"again": ["a", 1, 2]},
    {"line": {}},
    {"line": "text"},
    {"lines": ["text"]},
    {"lines": [{"cents": 1}]},
]


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A project; its second aggregate shares the topic of the first."""
    made = Repository(tmp_path / "project")
    made.write("pyproject.toml", f'[project]\nname = "shop"\nversion = "1.2.3"\n{PROJECT}')
    made.events.write("common.schema.json", COMMON)
    made.events.aggregate("order", placed_v1=PLACED, placed_v2=payload({"sku": {"type": "integer"}}), paid_v1=PAID)
    made.events.aggregate("refund", 'key = "id"\nversion = "number"\ntopic = "shop.order"\n', given_v1=payload())
    made.events.write("order/upcast.py", "def placed_v1(payload):\n    return payload\n")
    return made


@pytest.fixture
def known(repository: Repository) -> Catalog:
    return repository.events.load()


@cache
def specification() -> jsonschema_rs.Draft7Validator:
    """The validator of AsyncAPI documents."""
    return jsonschema_rs.Draft7Validator(json.loads(gzip.decompress(SPECIFICATION.read_bytes())))


def valid(document: dict[str, Any]) -> None:
    """Fail with what the specification's schema finds in a document."""
    found = specification().iter_errors(document)
    assert [(list(error.instance_path), error.message) for error in found] == []


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
            assert node.keys() == {"$ref"}, "draft 7 ignores what stands beside a reference"
        node = list(node.values())
    for child in node if isinstance(node, list) else ():
        yield from references(child)


def validator(document: dict[str, Any], part: dict[str, Any]) -> jsonschema_rs.Draft7Validator:
    """A validator of a schema in a document, as a reader of AsyncAPI makes one that knows the format ``uuid``."""
    uuid = jsonschema_rs.Draft202012Validator({"format": "uuid"}, validate_formats=True)
    schema = {**part, "components": document["components"]}
    return jsonschema_rs.Draft7Validator(schema, validate_formats=True, formats={"uuid": uuid.is_valid})


class TestAsyncApi:
    def test_command_writes_a_valid_document(self, repository: Repository) -> None:
        done = repository.run("export", "--asyncapi")
        assert done.returncode == 0, done.stderr
        file = repository.root / "events.json"
        assert repository.run("export", "--asyncapi", str(file)).stdout == f"written: {file}\n"
        assert file.read_text() == done.stdout
        document = json.loads(done.stdout)
        valid(document)
        found = [*references(document)]
        assert len(found) > 10
        assert None not in [pointed_at(document, reference) for reference in found], "it stands alone"
        assert document["components"]["schemas"].keys() == document["components"]["messages"].keys()
        assert document["info"] == {"title": "shop", "version": "1.2.3"}
        assert "servers" not in document
        [channel] = document["channels"].values()
        assert channel["address"] == "shop.order"
        assert set(channel["messages"]) == {"order.placed.v1", "order.placed.v2", "order.paid.v1", "refund.given.v1"}
        messages = document["components"]["messages"]
        assert [name for name, one in messages.items() if one.get("x-deprecated")] == ["order.paid.v1"]
        assert [name for name, one in messages.items() if one.get("x-personal")] == ["order.placed.v1"]
        assert messages["order.placed.v1"]["tags"] == [{"name": "personal-data"}]
        assert len(messages["order.placed.v1"]["examples"]) == 2

    @pytest.mark.parametrize("source", ["", "/shop/"])
    def test_examples_are_valid_messages(self, known: Catalog, source: str) -> None:
        document = asyncapi.document(Project(Path.cwd(), cloudevents_source=source), known)
        valid(document)
        count = 0
        for message in document["components"]["messages"].values():
            for example in message["examples"]:
                validator(document, message["payload"]).validate(example["payload"])
                validator(document, message["headers"]).validate(example["headers"])
                assert ("ce_id" in example["headers"]) is bool(source)
                count += 1
        assert count == 3
        ours = document["components"]["messages"]["order.placed.v2"]["headers"]["properties"]
        assert (ours["eventType"]["const"], ours["schemaVersion"]["const"]) == ("placed", "2")
        if source:
            assert ours["ce_source"]["const"] == "/shop/order"

    def test_payloads_are_valid_as_they_are_to_append(self, known: Catalog) -> None:
        document = asyncapi.document(Project(Path.cwd()), known)
        found = []
        for schema in known.schemas:
            reader = validator(document, {"$ref": f"#/components/schemas/{schema.name}"})
            for more in PAYLOADS:
                tried = {**EXAMPLE, **more}
                found.append(reader.is_valid(tried))
                assert found[-1] is (schema.violation(tried) is None), (schema.name, tried)
        assert 10 < sum(found) < len(found) - 10

    @given(DOCUMENTS, st.data())
    @hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
    def test_any_schema_means_the_same_to_a_reader(self, document: dict[str, Any], data: st.DataObject) -> None:
        properties_ = {**document["properties"], "id": {"type": "string"}}
        required = [*document.get("required", []), "id"]
        try:
            schema = EventSchema(
                "order", "placed", 1, {**document, "properties": properties_, "required": required}, "id"
            )
        except Failure:
            return  # it cannot be declared
        aggregate = Aggregate("order", "shop.order", "id", events={"placed": {1: schema}})
        made = asyncapi.document(Project(Path("nowhere")), Catalog(Path("nowhere"), {"order": aggregate}))
        valid(made)
        reader = validator(made, {"$ref": "#/components/schemas/order.placed.v1"})
        for _ in range(3):
            found = json.loads(json.dumps(value(data, [expanded(schema.document)]), default=float))
            assert reader.is_valid(found) is (schema.violation(found) is None)

    def test_key_is_text_whatever_its_column(self, tmp_path: Path) -> None:
        for type_, rule in {
            "number": {"type": "integer", "minimum": 1, "maximum": 9},
            "uuid": {"type": "string", "format": "uuid"},
        }.items():
            schema = {"type": "object", "required": ["id"], "properties": {"id": rule}}
            Events(tmp_path).aggregate(type_, 'key = "id"\n', made_v1=schema)
        document = asyncapi.document(Project(tmp_path), Events(tmp_path).load())
        valid(document)
        keys = {
            name: jsonschema_rs.Draft7Validator(one["bindings"]["kafka"]["key"])
            for name, one in document["components"]["messages"].items()
        }
        assert keys["number.made.v1"].is_valid("7")
        assert not keys["number.made.v1"].is_valid(7)
        assert not keys["uuid.made.v1"].is_valid("01A1FC75-167D-7239-AF57-D1EE1A62E0A6")


@pytest.mark.parametrize("target", ["missing/events.json", "."])
def test_unwritable_file_is_one_line(repository: Repository, target: str) -> None:
    done = repository.run("export", "--asyncapi", str(repository.root / target))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "cannot be written: " in line
