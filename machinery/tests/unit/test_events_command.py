"""`outbox events`: the list, and the check of examples, upcasters and edits since a git revision."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outbox.base import project
from outbox.base.project import Project
from outbox_lab.events import checks, revision
from outbox_lab.testing.command import outbox
from outbox_lab.testing.failures import raises
from tests.support.declared import EXAMPLE, PROJECT, TOML, Events, Repository, payload

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
        [paid, placed] = json.loads(repository.run("--json").stdout)
        assert paid["versions"] == [{"version": 1, "deprecated": True, "consumers": ["totals", "first"]}]
        assert {name: placed[name] for name in placed.keys() - {"versions"}} == {
            "aggregate": "order",
            "topic": "shop.order",
            "partitions": 4,
            "key": "id",
            "version": "number",
            "event": "order.placed",
        }

    def test_sinks_that_cannot_be_loaded_are_a_note(self, repository: Repository) -> None:
        done = repository.run()
        assert done.returncode == 0
        assert "order.placed" in done.stdout
        assert done.stderr.startswith("note: the sinks cannot be loaded: ")
        assert "Traceback" not in done.stderr

    def test_no_events_are_no_failure(self, tmp_path: Path) -> None:
        done = Repository(tmp_path / "project").run()
        assert (done.returncode, done.stdout) == (0, "no events are declared\n")

    def test_declaration_that_cannot_be_used_is_one_line(self, repository: Repository) -> None:
        repository.events.write("order/aggregate.toml", "")
        done = outbox("events", "check", home=repository.home, **{project.VARIABLE: str(repository.root)})
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert "aggregate.toml" in line


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
            ({**EXAMPLE, "it": 1}, "it"),
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
            (UPCAST.replace("{**payload, 'label': ''}", returned), rule, property_)
            for returned, rule, property_ in (
                ("None", "upcaster-failed", ""),
                ("payload", "upcaster-failed", "label"),
                ("{}['x']", "upcaster-failed", ""),
                ("exit(0)", "upcaster-failed", ""),
                ("{**payload, 'label': 1}", "upcaster-failed", "label"),
                ("{**payload, 'label': '', 'id': 'b'}", "upcaster-failed", "id"),
                ("{**payload, 'label': '', 'number': 2}", "upcaster-failed", "number"),
                ("payload.update(label='') or payload", "upcaster-impure", ""),
                ("payload['lines'][0].clear() or {**payload, 'label': ''}", "upcaster-impure", ""),
                ("{**payload, 'label': str(__import__('uuid').uuid4())}", "upcaster-impure", ""),
            )
        ]
        + [
            (
                "seen = []\n"
                "def placed_v1(payload):\n    seen.append(1)\n    return {**payload, 'label': 'x' * len(seen)}\n",
                "upcaster-impure",
                "",
            ),
            (f"{UPCAST}def palced_v1(payload):\n    return payload\n", "upcaster-unused", ""),
            (f"{UPCAST}def placed_v3(payload):\n    return payload\n", "upcaster-unused", ""),
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

    def test_file_that_cannot_run_is_a_failure(self, events: Events) -> None:
        with raises("event-declaration-unusable"):
            checks.examples(events.write("order/upcast.py", "def").load())


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

    def test_sinks_that_can_start_have_no_finding(self, shop: Repository) -> None:
        assert shop.findings() == shop.findings("--against", "HEAD") == []
        assert shop.run("check").stderr == ""

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
            ("{}/orders/projections/totals.sql", None, ("projection-unusable", "sink orders")),
            ("{}/orders/job.py", "job = 1 / 0\n", ("sinks-unusable", "sinks")),
        ],
    )
    def test_sink_that_cannot_start_is_found(
        self, shop: Repository, tmp_path: Path, file: str, content: Any, finding: tuple[str, str]
    ) -> None:
        target = shop.root / file.format(f"sinks_of_{tmp_path.name}")
        if content is None:
            target.unlink()
        else:
            target.write_text(content if isinstance(content, str) else json.dumps(content))
        assert shop.findings() == [(*finding, "")]

    def test_projection_that_does_not_say_how_personal_data_is_erased_is_found(
        self, shop: Repository, tmp_path: Path
    ) -> None:
        shop.events.aggregate("order", placed_v1=payload({"price": {"type": "number", "x-personal": True}}))
        assert shop.findings() == [("erase-unsupported", "sink orders", "")]
        done = shop.run("check")
        assert done.stdout.startswith("sink orders: its events have personal data")
        assert "docs/events.md" not in done.stderr
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

    def test_events_that_are_gone_are_found_and_those_of_a_later_folder_are_new(self, repository: Repository) -> None:
        before = repository.git("rev-parse", "HEAD")
        shutil.rmtree(repository.events.folder / "order")
        assert repository.findings("--against", "HEAD") == [("aggregate-removed", "order/aggregate.toml", "")]
        repository.git("checkout", "--quiet", "--orphan", "empty")
        repository.git("rm", "-r", "--quiet", "--cached", ".")
        repository.git("commit", "--quiet", "--allow-empty", "--message=nothing")
        repository.events.aggregate("order", placed_v1=payload())
        assert repository.findings("--against", "HEAD") == []
        assert ("version-removed", "order/placed.v2.schema.json", "") in repository.findings("--against", before)

    def test_folder_or_prefix_that_was_renamed_is_followed(self, repository: Repository) -> None:
        repository.write("pyproject.toml", PROJECT.replace("shop", "store") + 'events = "declared"\n')
        (repository.events.folder).rename(repository.root / "declared")
        assert repository.findings("--against", "HEAD") == [("topic-changed", "order/aggregate.toml", "topic")]

    def test_project_in_a_folder_of_the_repository(self, tmp_path: Path) -> None:
        whole = Repository(tmp_path / "whole")
        inner = whole.root / "services" / "shop"
        whole.write("services/shop/pyproject.toml", PROJECT)
        events = Events(inner / "connect" / "events").aggregate("order", placed_v1=payload(LABEL))
        whole.commit()
        events.aggregate("order", placed_v1=payload())
        done = whole.run("check", "--against", "HEAD", OUTBOX_PROJECT=str(inner))
        assert done.returncode == 1
        assert "[property-removed]" in done.stdout

    @pytest.mark.parametrize("name", ["nowhere", "--all", "HEAD:connect", ""])
    def test_unknown_revision_is_reported(self, repository: Repository, name: str) -> None:
        done = repository.run("check", f"--against={name}")
        assert (done.returncode, repository.code) == (1, "revision-unknown")
        [line] = done.stderr.splitlines()
        assert line.startswith("outbox: this clone has no revision")

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
        repository.write("pyproject.toml", f'{PROJECT}events = "../elsewhere"\n')
        repository.commit()
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
        for root, problem in ((tmp_path, "not a git repository"), (repository.root, "outside repository")):
            with raises("git-failed", problem):
                revision.published(Project(root), "HEAD", 4)
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

    @pytest.mark.parametrize(("file", "text"), [("connect/events/order/aggregate.toml", ""), ("pyproject.toml", "[")])
    def test_events_that_were_unusable_are_reported(self, repository: Repository, file: str, text: str) -> None:
        repository.write(file, text)
        repository.commit()
        with raises("revision-unusable"):
            revision.published(Project(repository.root), "HEAD", 4)
