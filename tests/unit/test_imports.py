"""Who may import whom: the machinery knows nothing of the sample, and each subcommand loads only what it needs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import ROOT

# The packages of this repository, and which of them each may import beside itself. demo and bench nobody may.
MAY_IMPORT: dict[str, set[str]] = {
    "outbox": set(),
    "service": {"outbox"},
    "sinks": {"outbox"},
    "migrations": {"outbox"},
    "demo": {"outbox", "service", "sinks"},
    "bench": {"outbox", "service", "sinks"},
    "tests": {"outbox", "service", "sinks"},
}
# The streaming side of the sinks' engine; its apply knows no Spark, so that tests and benchmarks drive it as it is.
STREAM = {
    Path("outbox/sink", f"{module}.py") for module in ("stream", "spark", "checkpoint", "decode", "job", "lakehouse")
}
FILES = [file.relative_to(ROOT) for package in MAY_IMPORT for file in sorted(Path(ROOT, package).rglob("*.py"))]


def imported(source: str) -> Iterator[str]:
    """The modules that a source imports, wherever in it. A relative import stays in its package, so it is left out."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module


def foreign(package: str, source: str) -> set[str]:
    """What a source of a package imports of this repository's other packages against the rule."""
    tops = {module.partition(".")[0] for module in imported(source)}
    return (tops & set(MAY_IMPORT)) - {package} - MAY_IMPORT[package]


@pytest.mark.parametrize(
    ("package", "source", "wrong"),
    [
        ("outbox", "import outbox.base.settings, service.app", {"service"}),
        ("outbox", "def f():\n    from sinks import job", {"sinks"}),
        ("service", "from outbox.writing.append import append\nfrom service import tables", set()),
        ("service", "from sinks.events import Event", {"sinks"}),
        ("sinks", "import service", {"service"}),
        ("tests", "if True:\n    import demo.run as run", {"demo"}),
        ("demo", "import bench", {"bench"}),
        ("outbox", "from . import service", set()),
        ("outbox", "import services, demonstration", set()),
    ],
)
def test_the_rule_sees_what_is_wrong(package: str, source: str, wrong: set[str]) -> None:
    assert foreign(package, source) == wrong


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_module_imports_only_what_its_package_may(file: Path) -> None:
    assert foreign(file.parts[0], (ROOT / file).read_text()) == set()


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.parts[0] in ("outbox", "service", "migrations")], ids=str
)
def test_spark_is_imported_by_the_streaming_side_of_the_sinks_only(file: Path) -> None:
    tops = {module.partition(".")[0] for module in imported((ROOT / file).read_text())}
    assert file in STREAM or "pyspark" not in tops


def test_nothing_imports_a_repository_package_that_the_rule_does_not_know() -> None:
    found = {file.parent.name for file in ROOT.glob("*/__init__.py")}
    assert found <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", ["outbox.cli", "outbox.commands.stack", "outbox.commands.connect"])
def test_a_command_of_the_stack_loads_neither_spark_nor_the_service(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "outbox" in loaded
    assert not loaded & {"pyspark", "pyarrow", "pandas", "flask", "sqlalchemy", "alembic", "service", "sinks"}


def test_dead_letters_are_replayed_without_spark() -> None:
    program = (
        "import json, sys, outbox.commands.dead_letters; from outbox.sink import job; from outbox import settings;"
        "job.load(settings.load()); print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert "sinks" in loaded
    assert not loaded & {"pyspark", "py4j", "pandas"}
