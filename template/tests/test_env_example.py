"""`.env.example` lists every setting, as outbox/base/settings.py has it.

python -m template.tests.test_env_example > .env.example
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin
from unittest import mock
from urllib.parse import unquote

import pytest
from dotenv import dotenv_values
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo
from outbox.base import project
from outbox.base.project import Project
from outbox.base.settings import FIELDS, PREFIX, READ_ELSEWHERE, DatabaseUrl, Secret, load

from template.tests.paths import ROOT

FILE = ROOT / ".env.example"

HEAD = """\
# Every setting, with its default. Copy this file to .env and uncomment what you change.
# A default in angle brackets, such as <topic-prefix>, is the value of that key in [tool.outbox] of pyproject.toml.
# The environment wins over .env, .env over the embedded stack's own choices (stack.env in the home folder).
#
# docker-compose reads .env too. Its servers, certificates, folders and metrics ports are its own, and it has no UI of
# Spark; it uses all other settings, and all passwords but the superuser's.
"""
# The field that begins each group.
GROUPS = {
    "home": "Files and downloads",
    "source_db_url": "Database of the service",
    "sink_db_url": "Database of the sinks",
    "kafka_bootstrap": "Kafka",
    "connect_url": "Kafka Connect and the connector",
    "service_bind": "The service",
    "sink_storage": "The sinks",
    "log_level": "Logs",
}
TAIL = """\

# Read from the environment only -----------------------------------------------
# multiplies every timeout, for slow machines
# OUTBOX_TIMEOUT_SCALE=1
# log level of the broker and of the Connect worker
# OUTBOX_JVM_LOG_LEVEL=warn

# Read by docker-compose only --------------------------------------------------
# ports on 127.0.0.1, with docker-compose.monitoring.yml
# OUTBOX_GRAFANA_PORT=3000
# OUTBOX_PROMETHEUS_PORT=9090
# memory of a sink's container: the heap of its driver plus about 750m
# OUTBOX_SINK_MEMORY_LIMIT=1536m
# cores of the Spark cluster for each process of sinks, with docker-compose.cluster.yml
# OUTBOX_SPARK_CORES=2
"""


def render() -> str:
    """The text of the file. It holds no name of the project, but the key of each."""
    keys = {field.name: f"<{field.name.replace('_', '-')}>" for field in fields(Project) if field.type == "str"}
    with mock.patch.object(project, "current", return_value=Project(root=ROOT, **keys)):  # type: ignore[arg-type]
        return HEAD + "".join(f"{line}\n" for line in _lines()) + TAIL


def with_names(text: str) -> str:
    """A text with the project's value in place of each key."""
    return re.sub(r"<([a-z-]+)>", lambda key: str(getattr(project.current(), key[1].replace("-", "_"))), text)


def _lines() -> Iterator[str]:
    for name, field in FIELDS.items():
        if name in GROUPS:
            yield ""
            yield f"# {GROUPS[name]} ".ljust(80, "-")
        if comment := "; ".join(filter(None, [_description(field), _choices(field)])):
            yield from textwrap.wrap(comment, 100, initial_indent="# ", subsequent_indent="# ")
        yield f"# {PREFIX}{name.upper()}={_quoted(_default(field))}"


def _description(field: FieldInfo) -> str:
    return "".join(one for one in getattr(field.type, "__metadata__", ()) if isinstance(one, str))


def _choices(field: FieldInfo) -> str:
    kind = get_args(field.type)[0] if get_origin(field.type) is Annotated else field.type
    return f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else ""


def _quoted(value: str) -> str:
    """Docker Compose replaces variables in a value of .env, but for one in single quotes."""
    return f"'{value}'" if "$" in value else value


def _default(field: FieldInfo) -> str:
    default = field.default_factory() if field.default is NODEFAULT else field.default
    match default:
        case None:
            return ""
        case DatabaseUrl() as url:
            return unquote(str(url))
        case Secret() as secret:
            return secret.get_secret_value()
        case Path() as path:
            return path.relative_to(ROOT).as_posix()
        case bool() as switch:
            return str(switch).lower()
    return str(default)


def uncommented() -> str:
    """The file with every setting in it."""
    lines = [line.removeprefix("# ") for line in FILE.read_text().splitlines() if line.startswith(f"# {PREFIX}")]
    assert len(lines) > len(GROUPS)
    return "\n".join(lines)


def test_the_example_lists_every_setting_with_its_default() -> None:
    assert FILE.read_text() == render()


def test_every_variable_of_the_example_is_known() -> None:
    names = {line.partition("=")[0] for line in uncommented().splitlines()}
    assert names <= {f"{PREFIX}{name.upper()}" for name in FIELDS} | READ_ELSEWHERE.keys()


def test_as_it_is_the_example_sets_nothing() -> None:
    assert dotenv_values(FILE) == {}


def test_uncommented_the_example_sets_what_is_the_default_anyway(tmp_path: Path) -> None:
    dotenv = tmp_path / "env"
    dotenv.write_text(with_names(uncommented()))
    values = {name.removeprefix(PREFIX).lower(): value for name, value in dotenv_values(dotenv).items()}
    assert set(FIELDS) <= values.keys()
    read = load(
        tmp_path, environment=False, **{name: value for name, value in values.items() if value and name != "home"}
    )
    assert read == load(tmp_path, environment=False)


@pytest.mark.parametrize("line", uncommented().splitlines())
def test_docker_compose_reads_each_value_as_it_stands(line: str) -> None:
    # Its rules: nothing is replaced in single quotes; elsewhere `$`, quotes, backslashes and ` #` have a meaning.
    _, value = line.split("=", 1)
    assert re.fullmatch(r"[^\s'\"$\\#]*|'[^']*'", value)


if __name__ == "__main__":
    print(render(), end="")  # noqa: T201
