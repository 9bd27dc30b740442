"""The public API: every name can be imported, and the page of reference describes it and shows it in an example."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

MODULES = (
    "outbox",
    "outbox.aio",
    "outbox.asgi",
    "outbox.dbapi",
    "outbox.migrations",
    "outbox.sinks",
    "outbox_lab.soak",
    "outbox.spark",
    "outbox.targets",
    "outbox_lab.testing",
    "outbox_lab.testing.contract",
    "outbox_lab.walkthrough",
    "outbox.web",
)
EXAMPLE = re.compile(r"(?m)^ {4}.*\n")
PAGE = (ROOT / "docs" / "reference.md").read_text()


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_there_and_on_its_section_of_the_page(module: str) -> None:
    public = importlib.import_module(module)
    section = re.split(rf"^## `{re.escape(module)}`", PAGE, flags=re.MULTILINE)[1].partition("\n## ")[0]
    examples = "".join(EXAMPLE.findall(section))
    prose = EXAMPLE.sub("", section)
    for name in public.__all__:
        assert getattr(public, name)
        assert re.search(rf"\b{name}\b", prose), f"{name} is not described"
        assert re.search(rf"\b{name}\b", examples), f"{name} is in no example"


@pytest.mark.parametrize("module", ["outbox", "outbox.migrations"])
def test_another_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = importlib.import_module(module).nothing


def test_who_writes_events_loads_neither_spark_nor_a_framework() -> None:
    program = "import outbox, sys; outbox.append, outbox.Event; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"pyspark", "pyarrow", "flask", "fastapi", "alembic"} & {*done.stdout.split()}


@pytest.mark.parametrize(
    ("module", "foreign"),
    [
        ("outbox.web", {"fastapi", "starlette", "asyncpg"}),
        ("outbox.asgi", {"flask", "flask_openapi3", "werkzeug"}),
        ("outbox.http.worker", {"flask", "werkzeug", "fastapi", "starlette", "asyncpg"}),
        ("outbox.dbapi", {"sqlalchemy", "alembic", "pydantic", "flask", "fastapi", "psycopg2", "dotenv"}),
    ],
)
def test_an_adapter_loads_no_other_framework(module: str, foreign: set[str]) -> None:
    program = f"import {module}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not foreign & {*done.stdout.split()}
