"""`outbox events export`: the AsyncAPI document by the specification's own schema; the page by what a browser loads."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox.base.errors import Failure
from outbox.base.project import Project
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.schema import EventSchema
from outbox_lab.events import asyncapi, properties
from outbox_lab.events.expansion import expanded
from outbox_lab.events.properties import Difference
from tests.support.declared import EXAMPLE, Events, payload
from tests.support.event_project import TOML, Repository
from tests.support.made_schemas import DOCUMENTS, value
from tests.support.paths import ROOT
from tests.support.suite import DOMAIN

SPECIFICATION = ROOT / "tests" / "support" / "asyncapi" / "3.0.0.json.gz"
HOSTILE = "</pre><script>document.title = 'taken'</script><img src=x onerror=alert(1)>"
PROJECT = f'[project]\nname = "shop"\nversion = "1.2.3"\n{TOML.replace("no_sinks", "export_jobs")}'
JOBS = """
from outbox.sinks import SinkJob

jobs = [
    SinkJob(name="totals", events=["order"]),
    SinkJob(name="first", events=["order.placed.v1"], strategy="naive", transform="shop.sums:daily"),
    SinkJob(name="lost", events=["order.lost"]),
]
"""
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
    """A project with sinks; its second aggregate shares the topic of the first."""
    made = Repository(tmp_path / "project")
    made.write(
        "pyproject.toml", f'[project]\nname = "shop"\nversion = "1.2.3"\n{TOML.replace("no_sinks", "export_jobs")}'
    )
    for name in ("", "all/"):
        made.write(f"export_jobs/{name}__init__.py", "")
    made.write("export_jobs/all/job.py", JOBS)
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
        document = json.loads(done.stdout)
        valid(document)
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

    def test_document_stands_alone(self, known: Catalog) -> None:
        document = asyncapi.document(Project(Path.cwd()), known)
        for reference in references(document):
            target = document
            for word in reference.removeprefix("#/").split("/"):
                target = target[word]
        # One copy of what events share, and two of what only has the same name.
        schemas = document["components"]["schemas"]
        assert [name for name in schemas if name.endswith("sku")] == ["common.sku"]
        assert [name for name in schemas if name.endswith("line")] == ["order.paid.v1.line", "order.placed.v1.line"]

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

    def test_fixture_domain(self) -> None:
        valid(asyncapi.document(Project(DOMAIN), catalog.load(DOMAIN / "events", "stock")))


class Page(HTMLParser):
    """What a browser would load, run, and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, content in attrs:
            self.links += [content or ""] if name in ("href", "src") else []
            self.ids += [content or ""] if name == "id" else []
            self.handlers += [name] if name.startswith("on") else []

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


class TestPage:
    def test_shows_events_versions_and_their_sinks(self, repository: Repository) -> None:
        done = repository.run("export", "--html", str(repository.root / "events.html"))
        assert (done.returncode, done.stdout) == (0, f"written: {repository.root / 'events.html'}\n"), done.stderr
        page = Page((repository.root / "events.html").read_text())
        assert {"order.placed", "order.placed.v1", "refund.given.v1", "sink-totals", "sink-first"} <= set(page.ids)
        assert len(page.ids) == len(set(page.ids))
        assert {link.removeprefix("#") for link in page.links if link.startswith("#")} <= set(page.ids)
        text = re.sub(r" (?=[,.])", "", " ".join(page.text.split()))
        assert "Taken by totals, first." in text
        assert "No sink of this project takes it." in text
        assert "changed sku string → integer; " in text
        assert "strategy naive target sink database transform shop.sums:daily" in text
        assert "there is no event order.lost" in text
        assert done.stderr.startswith("note: sink lost: there is no event order.lost")
        assert "personal data" in text
        assert "deprecated" in text

    def test_declarations_stay_text_and_nothing_is_loaded(self, repository: Repository) -> None:
        hostile = payload(
            {"note": {"type": "string", "description": HOSTILE, "enum": [HOSTILE], "x-personal": True}},
            title=HOSTILE,
            description=HOSTILE,
            examples=[{**EXAMPLE, "note": HOSTILE}],
        )
        repository.events.aggregate("order", placed_v2=hostile)
        repository.write("export_jobs/all/job.py", f"raise ValueError({HOSTILE!r})")
        done = repository.run("export", "--html")
        assert done.returncode == 0, done.stderr
        page = Page(done.stdout)
        assert not page.tags & {"script", "img", "iframe", "object", "form", "base"}
        assert page.handlers == []
        assert all(link.startswith("#") or link == "data:," for link in page.links)
        # Description and property, each with its copy in the example or the schema; and the note about the sinks.
        assert page.text.count(HOSTILE) > 5
        assert "default-src 'none'" in done.stdout


def test_differences_of_nested_properties(tmp_path: Path) -> None:
    def lines(**rules: Any) -> dict[str, Any]:
        return {"lines": {"type": "array", "items": {"type": "object", **rules}}}

    sku, number = {"type": "string", "maxLength": 3}, {"type": "integer"}
    made = Events(tmp_path).aggregate(
        "order",
        placed_v1=payload(lines(required=["sku"], properties={"sku": sku, "pieces": number}), ("lines",)),
        placed_v2=payload(lines(properties={"sku": {**sku, "maxLength": 4}, "cents": number})),
    )
    versions = made.load().aggregates["order"].events["placed"]
    assert properties.differences(versions[1], versions[2]) == [
        Difference("removed", "lines[].pieces", "integer"),
        Difference("changed", "lines", "required → optional"),
        Difference("changed", "lines[].sku", "required → optional; maxLength 3 → maxLength 4"),
        Difference("added", "lines[].cents", "integer, optional"),
    ]
    assert properties.differences(versions[1], versions[1]) == []


def test_both_files_at_once(repository: Repository) -> None:
    files = [str(repository.root / name) for name in ("events.json", "events.html")]
    done = repository.run("export", "--asyncapi", files[0], "--html", files[1])
    assert done.stdout.splitlines() == [f"written: {file}" for file in files], done.stderr
    valid(json.loads(Path(files[0]).read_text()))


@pytest.mark.parametrize("target", ["missing/events.json", ".", "pyproject.toml/events.json"])
def test_unwritable_file_is_one_line(repository: Repository, target: str) -> None:
    done = repository.run("export", "--asyncapi", str(repository.root / target))
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"{target} cannot be written: " in line or "cannot be written: Is a directory" in line


def test_page_needs_jinja2_and_the_document_does_not(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "outbox_lab.events.page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert repository.run("export", "--asyncapi").returncode == 0
    assert (repository.run("export", "--html").returncode, repository.code) == (1, "generator-missing")


@pytest.mark.parametrize("arguments", [(), ("--html", "--asyncapi")])
def test_one_output_has_one_content(repository: Repository, arguments: tuple[str, ...]) -> None:
    assert repository.run("export", *arguments).returncode == 2
