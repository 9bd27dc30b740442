"""`outbox new`: what it writes is used as it is, and what cannot be written leaves the project as it was."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from click import UsageError
from click.testing import CliRunner, Result

from outbox import cli
from outbox.base import project
from outbox.base.settings import load
from outbox.events import catalog
from outbox_lab.events import checks
from outbox_lab.new.change import view_columns
from outbox_lab.testing.failures import raises

TOML = """
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


class Project:
    """A project, and the command run in it."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.package = f"sinks_{next(NUMBERS)}"  # a process imports a package once
        for name in [name for name in os.environ if name.startswith("OUTBOX_")]:
            patch.delenv(name)
        patch.setenv(project.VARIABLE, str(root))
        patch.syspath_prepend(str(root))
        self.write("pyproject.toml", TOML.format(package=self.package))

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
        made = Project(tmp_path_factory.mktemp("written"), patch)
        made.new(*ORDER)
        made.new(*STOCK)
    return made.root


@pytest.fixture
def shop(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(shutil.copytree(written, tmp_path / "shop"), monkeypatch)


def test_migrations_follow_each_other_and_the_machinery(shop: Project) -> None:
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
def test_what_cannot_be_written_leaves_everything_as_it_is(shop: Project, words: tuple[str, ...], code: str) -> None:
    before = shop.files
    with raises(code):
        shop.new(*words)
    assert shop.files == before


def test_options_that_exclude_each_other_are_refused(shop: Project) -> None:
    for words in (["--lakehouse", "--table", "lake"], ["--total", "cents", "--history"]):
        with pytest.raises(UsageError, match=f"{words[0]} cannot be combined with --"):
            shop.new("sink", "orders", "--events", "order", *words)


def test_rows_of_personal_data_can_be_erased(shop: Project) -> None:
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


def test_nothing_is_overwritten_and_nothing_is_written_in_part(shop: Project) -> None:
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
