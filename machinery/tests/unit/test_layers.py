"""Who may import whom: the wings and layers of docs/architecture.md, and what each subcommand loads. What the pages of
reference, architecture and the runbook name exists.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import click
import pytest

from outbox.cli import outbox
from tests.support import runbook
from tests.support.paths import ROOT
from tests.support.runbook import PARTS, Entry

# The rooms of both wings, from the bottom up. A room imports rooms of earlier lines only.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("outbox.base", "outbox.install"),
    ("outbox.events",),
    ("outbox.writing",),
    ("outbox.jvm",),
    ("outbox.migrations",),
    ("outbox.http",),
    ("outbox.kafka",),
    ("outbox.relay",),
    ("outbox.sink.decoding",),
    ("outbox.sink.remembering",),
    ("outbox.sink",),
    ("outbox.sink.applying",),
    ("outbox.sink.discovery",),
    ("outbox.sink.repair", "outbox.sink.spark"),
    ("outbox.sink.applying.lakehouse",),
    ("outbox.sink.running",),
    ("outbox.audit",),
    ("outbox.maintenance",),
    ("outbox.commands",),
    ("outbox.cli",),
    ("outbox.__main__", "outbox.submit"),
    (
        *("outbox.__init__", "outbox.aio", "outbox.asgi", "outbox.dbapi", "outbox.handlers"),
        *("outbox.sinks", "outbox.spark", "outbox.targets", "outbox.web"),
    ),
    # What develops and proves.
    ("outbox_lab.events",),
    ("outbox_lab.new",),
    ("outbox_lab.stack",),
    ("outbox_lab.walkthrough",),
    ("outbox_lab.soak",),
    ("outbox_lab.commands",),
    ("outbox_lab.testing",),
    ("outbox_lab.__init__",),
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

SOURCES = ROOT / "src"
WINGS = ("outbox", "outbox_lab")  # what runs in production, and what develops and proves it: never the reverse

# Heavy libraries, and the only rooms that import them.
LIBRARIES: dict[str, set[str]] = {
    "pyspark": {
        *("outbox.sink.spark", "outbox.sink.running", "outbox.sink.applying.lakehouse"),
        *("outbox.spark", "outbox_lab.testing"),
    },
    "delta": {"outbox.sink.applying.lakehouse"},
    "flask": {"outbox.web"},
    "fastapi": {"outbox.asgi"},
    "asyncpg": {"outbox.http"},
    "opentelemetry": {"outbox.base"},
    "alembic": {"outbox.migrations"},
    "hypothesis": {"outbox_lab.testing"},
    "pytest": {"outbox_lab.testing"},
}

FILES = [file.relative_to(SOURCES) for file in sorted(SOURCES.rglob("*.py"))]
MODULES = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}


def imported(source: str) -> Iterator[str]:
    """The modules that a source imports, anywhere in it. ``from package import name`` counts as ``package.name``.

    Relative imports stay in their package and are left out.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    """The room of a module of ours; for other modules their package."""
    words = module.split(".")
    beginnings = (".".join(words[:length]) for length in range(len(words), 0, -1))
    return next((name for name in beginnings if name in HEIGHT), words[0])


def violations(file: Path, source: str) -> set[str]:
    """Imports of a file that break the rules, one line each."""
    module = ".".join(file.with_suffix("").parts)
    return {f"{file.as_posix()} imports {room(name)}" for name in imported(source) if not _may(module, name)}


def _may(module: str, name: str) -> bool:
    target = name.partition(".")[0]
    if target in LIBRARIES:
        return room(module) in LIBRARIES[target]
    if target not in WINGS:
        return target != "tests"
    if module.startswith("outbox_lab.") and target == "outbox":
        return True
    # A module outside the rooms may not be imported, and imports nothing of ours.
    is_lower = HEIGHT.get(room(name), len(LAYERS)) < HEIGHT.get(room(module), -1)
    return is_lower or room(module) == room(name) != target


def test_a_module_imports_only_what_its_layer_may() -> None:
    assert violations(Path("outbox/kafka/topics.py"), "from outbox import relay\nimport tests.shape")
    assert violations(Path("outbox/cli.py"), "def f():\n    from outbox_lab.commands import COMMANDS")
    assert violations(Path("outbox/sink/remembering/positions.py"), "import pyspark.sql")
    assert [one for file in FILES for one in violations(file, (SOURCES / file).read_text())] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Also for types only, or within a function. A module that is named by a text, as in a facade, is not seen."""
    graph = dict[str, set[str]]()
    for module, file in MODULES.items():
        places = [(name, name.rpartition(".")[0]) for name in imported((SOURCES / file).read_text())]
        graph[module] = {next((one for one in each if one in MODULES), module) for each in places} - {module}
    TopologicalSorter(graph).prepare()  # a CycleError names them


def loaded(program: str, **variables: str) -> set[str]:
    """The top-level packages that a program has loaded at its end."""
    program = f"{program}; import json, sys; print(json.dumps(list(sys.modules)))"
    environment, command = {**os.environ, **variables}, [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


# They take long to import. A command that needs one imports it when it runs.
HEAVY = {
    *("alembic", "deltalake", "duckdb", "flask", "hypothesis", "numpy", "pandas", "pyarrow", "py4j", "pyspark"),
    *("opentelemetry", "prometheus_client", "pydantic", "requests", "sqlalchemy", "structlog"),
}


def test_no_heavy_library_is_loaded_for_the_help_of_any_command() -> None:
    found = loaded(
        "import pkgutil; from outbox import cli;"
        "[pkgutil.resolve_name(entry.target) for entry in cli.commands().values()]"
    )
    assert {"outbox", "outbox_lab"} <= found
    assert found & HEAVY == set()


@pytest.mark.parametrize("words", ["events", "events check", "token", "sink --help", "status", "logs kafka"])
def test_quick_commands_load_no_heavy_library(words: str, tmp_path: Path) -> None:
    found = loaded(
        "from contextlib import redirect_stdout, suppress; import sys; from outbox import cli;"
        f"sys.argv[1:] = {words.split()};"
        "exec('with redirect_stdout(sys.stderr), suppress(SystemExit): cli.main()')",
        OUTBOX_HOME=str(tmp_path),
    )
    assert "outbox" in found
    assert found & HEAVY == set()
    if words in ("events", "token"):  # they read no topic and no database
        assert found & {"asyncio", "confluent_kafka", "psycopg2"} == set()


# The public API: every name can be imported, and the page of reference describes it and shows it in an example ----


PUBLIC = (
    *("outbox", "outbox.aio", "outbox.asgi", "outbox.dbapi", "outbox.migrations", "outbox.sinks", "outbox.spark"),
    *("outbox.targets", "outbox.web", "outbox_lab.soak", "outbox_lab.testing", "outbox_lab.testing.contract"),
    "outbox_lab.walkthrough",
)
EXAMPLE = re.compile(r"(?m)^ {4}.*\n")
REFERENCE = (ROOT / "docs" / "reference.md").read_text()


@pytest.mark.parametrize("module", PUBLIC)
def test_every_name_is_there_and_on_its_section_of_the_page(module: str) -> None:
    public = importlib.import_module(module)
    section = re.split(rf"^## `{re.escape(module)}`", REFERENCE, flags=re.MULTILINE)[1].partition("\n## ")[0]
    examples = "".join(EXAMPLE.findall(section))
    prose = EXAMPLE.sub("", section)
    for name in public.__all__:
        assert getattr(public, name)
        assert re.search(rf"\b{name}\b", prose), f"{name} is not described"
        assert re.search(rf"\b{name}\b", examples), f"{name} is in no example"


@pytest.mark.parametrize(
    ("statement", "foreign"),
    [
        ("import outbox; outbox.append, outbox.Event", {"pyspark", "pyarrow", "flask", "fastapi", "alembic"}),
        ("import outbox.web", {"fastapi", "starlette", "asyncpg"}),
        ("import outbox.asgi", {"flask", "flask_openapi3", "werkzeug"}),
        (
            "import outbox.commands.dead_letters; from outbox.sink import discovery; from outbox.base import settings;"
            "assert discovery.jobs(settings.load(environment=False))",
            {"pyspark", "py4j"},
        ),
        ("import outbox.http.worker", {"flask", "werkzeug", "fastapi", "starlette", "asyncpg"}),
        ("import outbox.dbapi", {"sqlalchemy", "alembic", "pydantic", "flask", "fastapi", "psycopg2", "dotenv"}),
    ],
)
def test_a_module_loads_no_framework_that_it_does_not_need(statement: str, foreign: set[str]) -> None:
    assert loaded(statement) & foreign == set()


# The page about the architecture: its table of transitions names the places that exist, and no others do ----------


ARCHITECTURE = ROOT / "docs" / "architecture.md"
SINK = ROOT / "src" / "outbox" / "sink"
PLACE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def test_each_place_of_a_transition_exists() -> None:
    places = set(PLACE.findall(ARCHITECTURE.read_text()))
    assert len(places) > 10
    for file, name in places:
        body = ast.parse((SINK / file).read_text()).body
        for part in name.split("."):
            kinds = ast.FunctionDef | ast.ClassDef
            (body,) = [one.body for one in body if isinstance(one, kinds) and one.name == part]


# The runbook: each entry has its parts, real commands and codes, and a rehearsal that exists --------------------------


ENTRIES = pytest.mark.parametrize("entry", runbook.entries().values(), ids=lambda entry: entry.title)


@cache
def strings() -> frozenset[str]:
    """Every string in the sources of the machinery."""
    return frozenset(
        node.value
        for file in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def parses(command: click.Command, words: list[str]) -> bool:
    """Whether a command has this subcommand, these arguments and these options."""
    context = click.Context(command)
    if isinstance(command, click.Group):
        found = command.get_command(context, words[0]) if words else None
        return found is not None and parses(found, words[1:])
    try:
        command.parse_args(context, words)
    except click.UsageError:
        return False
    return True


@ENTRIES
def test_entry_has_its_parts_a_rehearsal_and_real_commands_and_codes(entry: Entry) -> None:
    assert tuple(entry.parts) == PARTS
    assert all(text.strip() for text in entry.parts.values())
    assert entry.rehearsals
    for words in entry.mentioned:
        assert parses(outbox, list(words)), words
    assert set(entry.codes) <= strings()


def test_each_rehearsal_of_a_recovery_belongs_to_an_entry() -> None:
    rehearsed = {name for entry in runbook.entries().values() for name in entry.rehearsals}
    for file in (ROOT / "tests" / "recovery").glob("test_*.py"):
        tests = re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
        assert tests
        assert {f"tests/recovery/{file.name}::{name}" for name in tests} <= rehearsed
