"""`outbox events`: the list, the check of examples, upcasters and edits since a git revision, and the AsyncAPI document
by the specification's own schema. `outbox new`: what it writes is used as it is, and what cannot be written leaves the
project as it was.
"""

from __future__ import annotations

import gzip
import importlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema_rs
import pytest
from click import UsageError
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from outbox import cli
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.project import Project
from outbox.base.settings import load
from outbox.events import catalog
from outbox.events.catalog import Aggregate, Catalog
from outbox.events.references import pointed_at
from outbox.events.schema import EventSchema
from outbox_lab.events import asyncapi, checks, revision
from outbox_lab.events.expansion import expanded
from outbox_lab.new.change import view_columns
from outbox_lab.testing.failures import raises
from tests.support.declared import EXAMPLE, PROJECT, TOML, Events, Repository, payload
from tests.support.made_schemas import DOCUMENTS, value
from tests.support.paths import ROOT

LABEL = {"label": {"type": "string"}}
UPCAST = "def placed_v1(payload):\n    return {**payload, 'label': ''}\n"
PRICE = {"price": {"type": "number"}}
JOBS = """
from outbox.sinks import SinkJob

jobs = [
    SinkJob(name="totals", events=["order"]),
    SinkJob(name="first", events=["order.placed.v1", "order.paid"]),
    SinkJob(name="lost", events=["order.lost"]),
]
"""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "project")
    made.events.aggregate(
        "order",
        placed_v1=payload(examples=[EXAMPLE]),
        placed_v2=payload(LABEL, ("label",), examples=[{**EXAMPLE, "label": "a"}]),
        paid_v1=payload(deprecated=True),
    ).write("order/upcast.py", UPCAST)
    made.commit()
    return made


class TestList:
    def test_events_with_their_versions_and_sinks(self, repository: Repository) -> None:
        repository.write("jobs_of_it/__init__.py", "")
        repository.write("jobs_of_it/all/__init__.py", "")
        repository.write("jobs_of_it/all/job.py", JOBS)
        repository.write("pyproject.toml", PROJECT.replace("no_sinks", "jobs_of_it"))
        done = repository.run()
        assert done.returncode == 0, done.stderr
        lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
        assert lines == [
            "aggregate topic event versions key version consumers",
            "order shop.order order.paid 1 (deprecated) id number totals, first",
            "order shop.order order.placed 1, 2 id number totals, first (v1)",
        ]
        assert done.stderr.startswith("note: sink lost: there is no event order.lost")
        [paid, _] = json.loads(repository.run("--json").stdout)
        assert paid["versions"] == [{"version": 1, "deprecated": True, "consumers": ["totals", "first"]}]


class TestExamples:
    @pytest.fixture
    def events(self, tmp_path: Path) -> Events:
        first = payload(examples=[{**EXAMPLE, "lines": [{"a": 1}]}])
        second = payload(LABEL, ("label",), examples=[{**EXAMPLE, "label": "longer"}])
        return Events(tmp_path).aggregate("order", placed_v1=first, placed_v2=second)

    @pytest.mark.parametrize(
        ("example", "property_"),
        [
            ({"id": "a"}, "number"),
            ({**EXAMPLE, "at": "0000-12-31T23:59:59Z"}, "at"),
            (5, ""),
        ],
    )
    def test_invalid_one_is_named(self, events: Events, example: Any, property_: str) -> None:
        properties = {"it": {"type": "string"}, "at": {"type": "string", "format": "date-time"}}
        schema = payload(properties, examples=[EXAMPLE, example])
        [finding] = checks.examples(events.write("order/upcast.py", UPCAST).aggregate("item", moved_v2=schema).load())
        assert (finding.rule, finding.file, finding.property) == (
            "example-invalid",
            "item/moved.v2.schema.json",
            property_,
        )
        assert finding.message.startswith("example 2: ")

    @pytest.mark.parametrize(
        ("source", "rule", "property_"),
        [
            *(
                (UPCAST.replace("{**payload, 'label': ''}", returned), rule, property_)
                for returned, rule, property_ in (
                    ("{}['x']", "upcaster-failed", ""),
                    ("exit(0)", "upcaster-failed", ""),
                    ("{**payload, 'label': 1}", "upcaster-failed", "label"),
                    ("{**payload, 'label': '', 'id': 'b'}", "upcaster-failed", "id"),
                    ("{**payload, 'label': '', 'number': 2}", "upcaster-failed", "number"),
                    ("payload['lines'][0].clear() or {**payload, 'label': ''}", "upcaster-impure", ""),
                    ("{**payload, 'label': str(__import__('uuid').uuid4())}", "upcaster-impure", ""),
                )
            ),
            (f"{UPCAST}def palced_v1(payload):\n    return payload\n", "upcaster-unused", ""),
            # It fails for the example that the first one has made.
            (
                f"{UPCAST}def placed_v2(payload):\n    return {{**payload, 'more': 1 // len(payload['label'])}}\n",
                "upcaster-failed",
                "",
            ),
        ],
    )
    def test_upcaster_that_cannot_be_relied_on(self, events: Events, source: str, rule: str, property_: str) -> None:
        events.aggregate("order", placed_v3=payload({"more": {"type": "integer"}}, ("more",)))
        found = checks.examples(events.write("order/upcast.py", source).load())
        assert [(one.file, one.rule, one.property) for one in found] == [("order/upcast.py", rule, property_)]

    def test_upcaster_without_an_example_is_not_tested(self, events: Events) -> None:
        events.aggregate("order", placed_v1=payload()).write("order/upcast.py", UPCAST)
        [finding] = checks.examples(events.load())
        assert (finding.rule, finding.file) == ("example-missing", "order/placed.v1.schema.json")


class TestSinks:
    """A sink `orders` of all events of an aggregate, with one projection, examined with the declarations."""

    @pytest.fixture
    def shop(self, tmp_path: Path) -> Iterator[Repository]:
        made = Repository(tmp_path / "project")
        name = f"sinks_of_{tmp_path.name}"  # a process imports a package once
        made.write("pyproject.toml", PROJECT.replace("no_sinks", name))
        for file in ("__init__.py", "orders/__init__.py"):
            made.write(f"{name}/{file}", "")
        made.write(f"{name}/orders/job.py", "from outbox.sinks import SinkJob\njob = SinkJob(events=['order'])\n")
        made.write(f"{name}/orders/projections/totals.sql", "INSERT INTO totals SELECT price FROM new_events\n;\n")
        made.events.aggregate("order", placed_v1=payload(PRICE))
        made.commit()
        importlib.invalidate_caches()
        yield made
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]

    @pytest.mark.parametrize(
        ("file", "content", "finding"),
        [
            (
                "connect/events/order/placed.v2.schema.json",
                payload(PRICE, ("price",)),
                ("upcaster-missing", "sink orders"),
            ),
            (f"connect/events/order/{'x' * 60}.v1.schema.json", payload(), ("sink-unusable", "sink orders")),
            ("{}/orders/projections/totals.sql", "-- [aply]\nSELECT 1;\n", ("sql-section-unknown", "sink orders")),
            ("{}/orders/job.py", "job = 1 / 0\n", ("sinks-unusable", "sinks")),
        ],
    )
    def test_sink_that_cannot_start_is_found(
        self, shop: Repository, tmp_path: Path, file: str, content: Any, finding: tuple[str, str]
    ) -> None:
        target = shop.root / file.format(f"sinks_of_{tmp_path.name}")
        target.write_text(content if isinstance(content, str) else json.dumps(content))
        assert shop.findings() == [(*finding, "")]

    def test_projection_that_does_not_say_how_personal_data_is_erased_is_found(
        self, shop: Repository, tmp_path: Path
    ) -> None:
        assert shop.findings() == shop.findings("--against", "HEAD") == []
        shop.events.aggregate("order", placed_v1=payload({"price": {"type": "number", "x-personal": True}}))
        assert shop.findings() == [("erase-unsupported", "sink orders", "")]
        shop.write(f"sinks_of_{tmp_path.name}/orders/projections/totals.erase.sql", "-- nothing\n")
        assert shop.findings() == []


class TestAgainst:
    def test_events_as_they_were_have_no_finding(self, repository: Repository) -> None:
        # The environment changes nothing.
        done = repository.run("check", "--against", "HEAD", OUTBOX_TOPIC_PREFIX="other", OUTBOX_TOPIC_PARTITIONS="9")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "valid: 3 versions of events, 2 examples; no edit since HEAD breaks a reader\n"

    def test_incompatible_edit_names_property_and_rule(self, repository: Repository) -> None:
        repository.events.aggregate("order", placed_v2=payload({"label": {"type": "boolean"}}, ("label",)))
        repository.events.write("order/upcast.py", UPCAST.replace("''", "True"))
        file = "order/placed.v2.schema.json"
        assert repository.findings() == []
        assert repository.findings("--against", "main") == [
            ("type-changed", file, "label"),
            ("column-changed", file, "label"),
        ]
        done = repository.run("check", "--against", "main")
        assert done.returncode == 1
        assert done.stdout.startswith(f"{file}: label: its type was string and is boolean [type-changed]\n")
        assert done.stderr.splitlines()[-1].startswith("outbox: 2 problems found; first: ")
        assert "docs/events.md says which edit" in done.stderr

    def test_events_that_were_not_published_may_be_edited_and_removed(self, repository: Repository) -> None:
        unpublished = f"{TOML}published = false\n"
        for name in ("depot", "shelf"):
            repository.events.aggregate(name, unpublished, filled_v1=payload(LABEL))
        repository.commit()
        shutil.rmtree(repository.events.folder / "depot")
        repository.events.aggregate("shelf", unpublished, filled_v1=payload())
        done = repository.run("check", "--against", "HEAD")
        assert (done.returncode, done.stdout.endswith("; not published, not compared: shelf\n")) == (0, True)
        repository.events.aggregate("shelf", filled_v1=payload()).aggregate("order", unpublished)
        assert repository.findings("--against", "HEAD") == [("published-withdrawn", "order/aggregate.toml", "")]

    def test_a_folder_of_events_that_came_later_is_new(self, repository: Repository) -> None:
        repository.git("checkout", "--quiet", "--orphan", "empty")
        repository.git("rm", "-r", "--quiet", "--cached", ".")
        repository.git("commit", "--quiet", "--allow-empty", "--message=nothing")
        assert repository.findings("--against", "HEAD") == []

    @pytest.mark.parametrize("name", ["nowhere", "--all", "HEAD:connect", ""])
    def test_unknown_revision_is_reported(self, repository: Repository, name: str) -> None:
        with raises("revision-unknown", "this clone has no revision"):
            revision.published(Project(repository.root), name, 4)

    def test_shallow_clone_says_how_to_fetch(self, repository: Repository, tmp_path: Path) -> None:
        old = repository.git("rev-parse", "HEAD")
        repository.commit()
        clone = tmp_path / "clone"
        repository.git("clone", "--quiet", "--depth=1", f"file://{repository.root}", str(clone))
        with raises("revision-unknown", "shallow", f"git fetch origin {old}"):
            revision.published(Project(clone), old, 4)

    def test_git_that_cannot_answer_is_reported(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        with raises("git-failed", "not a git repository"):
            revision.published(Project(tmp_path), "HEAD", 4)
        for text, code in ((f'{PROJECT}events = "../elsewhere"\n', "git-failed"), ("[", "revision-unusable")):
            repository.write("pyproject.toml", text)
            repository.commit()
            with raises(code):
                revision.published(Project(repository.root), "HEAD", 4)
        monkeypatch.setenv("PATH", "")
        with raises("git-failed", "no git here"):
            revision.published(Project(repository.root), "HEAD", 4)

    def test_tree_that_leads_out_of_the_folder_writes_nothing_there(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # git writes no such file, but it stores, fetches and lists the tree.
        blob = repository.git("hash-object", "-w", "--stdin", given="evil")
        tree = repository.git("mktree", given=f"100644 blob {blob}\tevil")
        for name in ("..", "..", "events", "connect"):
            tree = repository.git("mktree", given=f"040000 tree {tree}\t{name}")
        commit = repository.git("commit-tree", tree, "-m", "evil")
        (tmp_path / "temporary").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        with raises("git-failed", "evil"):
            revision.published(Project(repository.root), commit, 4)
        assert list((tmp_path / "temporary").iterdir()) == []


# The AsyncAPI document ------------------------------------------------------------------------------------------------


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


@pytest.fixture
def shared(tmp_path: Path) -> Repository:
    """A project; its second aggregate shares the topic of the first."""
    made = Repository(tmp_path / "project")
    made.write("pyproject.toml", f'[project]\nname = "shop"\nversion = "1.2.3"\n{PROJECT}')
    made.events.write("common.schema.json", COMMON)
    made.events.aggregate("order", placed_v1=PLACED, placed_v2=payload({"sku": {"type": "integer"}}), paid_v1=PAID)
    made.events.aggregate("refund", 'key = "id"\nversion = "number"\ntopic = "shop.order"\n', given_v1=payload())
    made.events.write("order/upcast.py", "def placed_v1(payload):\n    return payload\n")
    return made


@pytest.fixture
def known(shared: Repository) -> Catalog:
    return shared.events.load()


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
    def test_command_writes_a_valid_document(self, shared: Repository) -> None:
        done = shared.run("export", "--asyncapi")
        assert done.returncode == 0, done.stderr
        file = shared.root / "events.json"
        assert shared.run("export", "--asyncapi", str(file)).stdout == f"written: {file}\n"
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

    @pytest.mark.parametrize(
        ("more", "is_valid"),
        [
            ({"sku": "AB"}, False),
            ({"sku": "AB", "part": {"sku": "A"}}, True),
            ({"sku": "ABCD", "part": {"sku": "A"}}, False),
            ({"part": {}}, False),
            ({"tree": {"below": [{"below": [{"below": 1}]}]}}, False),
            ({"pair": ["a", 1]}, False),
            ({"pair": ["a", 1], "line": {"cents": 1}}, True),
            ({"pair": ["a", 1, 2], "line": {"cents": 1}}, False),
            ({"again": ["a", 1, 2]}, False),
            ({"line": {}}, False),
        ],
    )
    def test_payloads_are_valid_as_they_are_to_append(
        self, known: Catalog, more: dict[str, Any], is_valid: bool
    ) -> None:
        document = asyncapi.document(Project(Path.cwd()), known)
        reader = validator(document, {"$ref": "#/components/schemas/order.placed.v1"})
        tried = {**EXAMPLE, **more}
        assert reader.is_valid(tried) is (known.schema("order", "placed", 1).violation(tried) is None) is is_valid

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


# `outbox new` ---------------------------------------------------------------------------------------------------------

SHOP = """
[tool.outbox]
topic-prefix = "shop"
sinks-package = "{package}"
sinks = [] # what `outbox sink` runs

[tool.ruff]
line-length = 120
"""
NUMBERS = itertools.count()
ORDER = ("aggregate", "order", "--events", "placed,paid", "--property", "cents:integer", "--optional", "note:text")
STOCK = ("aggregate", "stock", "--key", "product:text", "--property", "pieces:integer", "--table", "shelf")


class Shop:
    """A project, and the command run in it."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.package = f"sinks_{next(NUMBERS)}"  # a process imports a package once
        for name in [name for name in os.environ if name.startswith("OUTBOX_")]:
            patch.delenv(name)
        patch.setenv(project.VARIABLE, str(root))
        patch.syspath_prepend(str(root))
        self.write("pyproject.toml", SHOP.format(package=self.package))

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def new(self, *words: str) -> Result:
        """Raises what the command raises."""
        project.load.cache_clear()
        catalog.load.cache_clear()
        return CliRunner().invoke(cli.outbox, ["new", *words], catch_exceptions=False, standalone_mode=False)

    @property
    def files(self) -> Mapping[str, str]:
        found = [file for file in self.root.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        return {str(file.relative_to(self.root)): file.read_text() for file in found if ".git/" not in str(file)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with two aggregate types, to be copied: Ruff formats each file that a command writes."""
    with pytest.MonkeyPatch.context() as patch:
        made = Shop(tmp_path_factory.mktemp("written"), patch)
        made.new(*ORDER)
        made.new(*STOCK)
    return made.root


@pytest.fixture
def shop(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(shutil.copytree(written, tmp_path / "shop"), monkeypatch)


def test_migrations_follow_each_other_and_the_machinery(shop: Shop) -> None:
    first, second = (shop.root / "migrations" / "source" / name for name in ("0001_orders.py", "0002_shelf.py"))
    assert 'depends_on = ("source_machinery_0001",)' in first.read_text()
    assert 'down_revision = "source_domain_0001"' in second.read_text()
    assert view_columns("source_orders") == {"key", "version", "cents", "note", "occurred_at", "status"}
    shop.write("migrations/source/0003_more.py", 'revision = "b"\ndown_revision = "source_domain_0001"\n')
    with raises("migrations-branch", "b, source_domain_0002"):
        shop.new("aggregate", "late")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (ORDER, "name-unusable"),
        (("aggregate", "or der"), "name-unusable"),
        (("aggregate", "Order"), "event-declaration-unusable"),
        (("aggregate", "orders", "--table", "orders"), "name-taken"),
        (("aggregate", "tasks", "--table", "outbox"), "name-taken"),
        (("aggregate", "task", "--table", "user"), "name-unusable"),
        (("aggregate", "task", "--property", "order:text"), "name-unusable"),
        (("aggregate", "task", "--property", "cents:money"), "name-unusable"),
        (("aggregate", "task", "--key", "owner:text:personal"), "event-declaration-unusable"),
        (("aggregate", "task", "--events", "a,b", "--status", "user"), "name-unusable"),
        (("event", "order.placed"), "name-unusable"),
        (("version", "order.lost"), "name-unusable"),
        (("version", "order.placed", "--property", "cents:integer"), "name-unusable"),
        (("version", "order.placed", "--property", "vat:integer=none"), "name-unusable"),
        (("sink", "Orders", "--events", "order"), "name-unusable"),
        (("sink", "orders", "--events", "order.lost"), "event-undeclared"),
        (("sink", "orders", "--events", "order,order.paid"), "events-overlap"),
        (("sink", "orders", "--events", "order", "--table", "dead_letters"), "name-taken"),
        (("sink", "orders", "--events", "order", "--total", "note"), "events-unsuitable"),
        (("sink", "orders", "--events", "order,stock", "--total", "cents"), "events-unsuitable"),
        (("sink", "days", "--events", "order", "--history", "--status", "kind"), "events-unsuitable"),
    ],
)
def test_what_cannot_be_written_leaves_everything_as_it_is(shop: Shop, words: tuple[str, ...], code: str) -> None:
    before = shop.files
    with raises(code):
        shop.new(*words)
    assert shop.files == before


def test_options_that_exclude_each_other_are_refused(shop: Shop) -> None:
    for words in (["--lakehouse", "--table", "lake"], ["--total", "cents", "--history"]):
        with pytest.raises(UsageError, match=f"{words[0]} cannot be combined with --"):
            shop.new("sink", "orders", "--events", "order", *words)


def test_rows_of_personal_data_can_be_erased(shop: Shop) -> None:
    shop.new("aggregate", "patient", "--events", "come,gone", "--property", "owner:text:personal")
    shop.new("event", "patient.weighed", "--property", "weight:integer")
    shop.new("sink", "patients", "--events", "patient")
    shop.new("sink", "weights", "--events", "patient", "--total", "weight")
    shop.new("sink", "days", "--events", "patient,order")
    shop.new("sink", "orders", "--events", "order")
    files = {name: text for name, text in shop.files.items() if name.endswith(".erase.sql")}
    folders = {name.split("/")[1] for name in files}
    assert folders == {"patients", "weights", "days"}
    statement = "DELETE FROM patients WHERE sink = %(sink)s AND patient_id = %(key)s::uuid;"
    assert statement in files[f"{shop.package}/patients/projections/patients.erase.sql"]
    project.load.cache_clear()
    catalog.load.cache_clear()
    assert checks.sinks(load(environment=False)) == ([], "")


def test_nothing_is_overwritten_and_nothing_is_written_in_part(shop: Shop) -> None:
    shop.write("tests/integration/test_orders_sink.py", "ours")
    before = shop.files
    with raises("file-exists", "test_orders_sink.py"):
        shop.new("sink", "orders", "--events", "order")
    assert shop.files == before
    (shop.root / "tests" / "integration" / "test_orders_sink.py").unlink()
    (shop.root / "tests" / "integration").rmdir()
    shop.write("tests/integration", "a file where a folder must be")
    before = shop.files
    with raises("files-unwritable"):
        shop.new("sink", "orders", "--events", "order")
    assert shop.files == before
