"""Who may import whom: the wings and layers of docs/architecture.md, and what each subcommand loads."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.paths import ROOT

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
        "outbox.__init__",
        "outbox.aio",
        "outbox.asgi",
        "outbox.dbapi",
        "outbox.handlers",
        "outbox.sinks",
        "outbox.spark",
        "outbox.targets",
        "outbox.web",
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

# The packages that tests are in, and which others each may import.
PACKAGES: dict[str, set[str]] = {"outbox": set(), "outbox_lab": {"outbox"}, "tests": {"outbox", "outbox_lab"}}
SOURCES = ROOT / "src"
WINGS = ("outbox", "outbox_lab")  # what runs in production, and what develops and proves it: never the reverse

# Heavy libraries, and the only rooms and packages that import them.
LIBRARIES: dict[str, set[str]] = {
    "pyspark": {
        "outbox.sink.spark",
        "outbox.sink.running",
        "outbox.sink.applying.lakehouse",
        "outbox.spark",
        "outbox_lab.testing",
        "tests",
    },
    "delta": {"outbox.sink.applying.lakehouse", "tests"},
    "flask": {"outbox.web", "tests"},
    "fastapi": {"outbox.asgi", "tests"},
    "asyncpg": {"outbox.http", "tests"},
    "opentelemetry": {"outbox.base", "tests"},
    "alembic": {"outbox.migrations", "tests"},
    "hypothesis": {"outbox_lab.testing", "tests"},
    "pytest": {"outbox_lab.testing", "tests"},
}

FILES = [file.relative_to(SOURCES) for file in sorted(SOURCES.rglob("*.py"))]


def imported(source: str) -> Iterator[str]:
    """The modules that a source imports, anywhere in it. ``from package import name`` counts as ``package.name``.

    Relative imports stay in their package and are left out.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def renamed(source: str) -> set[str]:
    """Our modules that a source imports under another name, one line each."""
    return {
        f"{node.module}.{alias.name} as {alias.asname}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname not in {None, alias.name} and _is_ours(f"{node.module}.{alias.name}")
    }


def _is_ours(name: str) -> bool:
    path = Path(*name.split("."))
    return any((root / path).with_suffix(".py").exists() or (root / path).is_dir() for root in (SOURCES, ROOT))


def room(module: str) -> str:
    """The room of a module of outbox/; for other modules their package."""
    words = module.split(".")
    beginnings = (".".join(words[:length]) for length in range(len(words), 0, -1))
    return next((name for name in beginnings if name in HEIGHT), package(module))


def package(module: str) -> str:
    """The package of a module, as PACKAGES has it."""
    return module.partition(".")[0]


def violations(file: Path, source: str) -> set[str]:
    """Imports of a file that break the rules, one line each."""
    module = ".".join(file.with_suffix("").parts)
    return {f"{file.as_posix()} imports {room(name)}" for name in imported(source) if not _may(module, name)}


def _may(module: str, name: str) -> bool:
    ours, target = package(module), package(name)
    if target in LIBRARIES:
        return bool({module.partition(".")[0], room(module)} & LIBRARIES[target])
    if target not in PACKAGES:
        return True
    if ours == target and ours in WINGS:
        if room(module) == room(name):
            return True
        # A module outside the rooms may not be imported, and imports nothing of ours.
        return HEIGHT.get(room(name), len(LAYERS)) < HEIGHT.get(room(module), -1)
    return target == ours or target in PACKAGES.get(ours, set())


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        ("outbox/relay/rest.py", "import outbox.base.settings, tests.shape", {"tests"}),
        ("outbox/relay/rest.py", "from outbox.kafka import topics\nfrom outbox.relay import slot", set()),
        ("outbox/kafka/topics.py", "from outbox import relay", {"outbox.relay"}),
        ("outbox/sink/repair/replay.py", "from outbox.sink.remembering import positions", set()),
        ("outbox/sink/remembering/positions.py", "from outbox.sink import discovery", {"outbox.sink.discovery"}),
        ("outbox/sink/remembering/positions.py", "import pyspark.sql", {"pyspark"}),
        ("outbox/sink/spark/session.py", "from pyspark.sql import SparkSession", set()),
        ("outbox/new/module.py", "from outbox.base import wait", {"outbox.base"}),
        ("outbox/cli.py", "def f():\n    from outbox_lab.commands import COMMANDS", {"outbox_lab.commands"}),
        ("outbox_lab/soak/run.py", "from outbox.audit import check\nfrom outbox_lab.stack import ports", set()),
        ("tests/unit/test_cli.py", "import outbox.cli, pyspark", set()),
    ],
)
def test_the_rules_detect_violations(file: str, source: str, wrong: set[str]) -> None:
    assert violations(Path(file), source) == {f"{file} imports {name}" for name in wrong}


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_module_imports_only_what_its_layer_may(file: Path) -> None:
    assert violations(file, (SOURCES / file).read_text()) == set()


def circle(sources: Mapping[str, str]) -> list[str]:
    """The first circle found: each module imports the next, also for types only or within a function, and the last is
    the first. Without a circle it is empty. A module that is named by a text, as in a facade, is not seen.
    """
    graph = {
        module: {found for name in imported(source) if (found := _module_of(name, sources)) not in {None, module}}
        for module, source in sources.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _module_of(name: str, known: Mapping[str, str]) -> str | None:
    """The module that an import of this name loads: it, or the one that the name is in. None if it is not known."""
    return next((module for module in (name, name.rpartition(".")[0]) if module in known), None)


@pytest.mark.parametrize(
    ("sources", "found"),
    [
        ({"a": "import b", "b": "import c", "c": ""}, set()),
        ({"a": "import b", "b": "import c", "c": "import a"}, {"a", "b", "c"}),
        ({"p.a": "from p import b", "p.b": "from p.a import Name"}, {"p.a", "p.b"}),
        ({"a": "def f():\n    from b import Name", "b": "import a"}, {"a", "b"}),
    ],
)
def test_the_rule_on_circles_detects_them(sources: Mapping[str, str], found: set[str]) -> None:
    assert set(circle(sources)) == found


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    assert circle({module: (SOURCES / file).read_text() for module, file in modules.items()}) == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("from outbox.audit import check as checker", {"outbox.audit.check as checker"}),
        ("from outbox.audit.check import check as compare", set()),
        ("from pyspark.sql import functions as f", set()),
    ],
)
def test_the_rule_on_names_detects_violations(source: str, wrong: set[str]) -> None:
    assert renamed(source) == wrong


def test_modules_keep_their_names_when_imported() -> None:
    files = [*SOURCES.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    found = {str(file.relative_to(ROOT)): renamed(file.read_text()) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


def test_the_rules_know_every_room() -> None:
    for wing in WINGS:
        rooms = {f"{wing}.{file.parent.name}" for file in SOURCES.glob(f"{wing}/*/__init__.py")}
        modules = {f"{wing}.{file.stem}" for file in SOURCES.glob(f"{wing}/*.py")} - {f"{wing}.__init__"}
        assert rooms | modules <= set(HEIGHT)


def loaded(program: str, **variables: str) -> set[str]:
    """The top-level packages that a program has loaded at its end."""
    program = f"{program}; import json, sys; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
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


def test_dead_letters_are_replayed_without_spark() -> None:
    found = loaded(
        "import outbox.commands.dead_letters; from outbox.sink import discovery; from outbox.base import settings;"
        "discovery.jobs(settings.load(environment=False))"
    )
    assert "stock" in found
    assert not found & {"pyspark", "py4j"}
