"""Templates: each file of a folder becomes the file of the same path in the project.

The template ``state/sinks/MODULE/job.py.j2`` becomes ``job.py`` in a folder of ``sinks``: words in capitals are
values. A template that renders to nothing writes no file, and an empty template writes an empty one. A file of the same
path in the project's folder ``templates/outbox`` replaces ours, and one more adds a file.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, FileSystemLoader, StrictUndefined, TemplateError, select_autoescape
from sqlalchemy.dialects import postgresql

from outbox.base import project
from outbox.base.errors import Failure

OURS = Path(__file__).with_name("files")
OWN = Path("templates", "outbox")
SUFFIX = ".j2"
NEXT = f"next{SUFFIX}"
quoted = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]


def render(folder: str, values: Mapping[str, Any]) -> dict[Path, str]:
    """The files of a folder of templates, by their paths. Raises Failure if a template cannot be used."""
    environment, found = _environment(), dict[Path, str]()
    for name in environment.list_templates(filter_func=lambda one: one.startswith(f"{folder}/")):
        path = name.removeprefix(f"{folder}/").removesuffix(SUFFIX)
        text = "" if name.endswith(NEXT) else _rendered(environment, name, values)
        if text.strip() or not environment.loader.get_source(environment, name)[0]:  # type: ignore[union-attr]
            file = _target(re.sub("[A-Z]+", lambda word: str(values[word[0].lower()]), path))
            found[file] = _formatted(text) if file.suffix == ".py" else text
    return found


def next_steps(folder: str, values: Mapping[str, Any]) -> list[str]:
    """The next steps after the files of a folder are written, a line each."""
    return list(filter(str.strip, _rendered(_environment(), f"{folder}/{NEXT}", values).splitlines()))


def originals() -> dict[Path, str]:
    """Our templates, by their paths in the project's own folder of them."""
    root = project.current().root / OWN
    return {root / file.relative_to(OURS): file.read_text("utf-8") for file in sorted(OURS.rglob(f"*{SUFFIX}"))}


def _environment() -> Environment:
    made = Environment(
        loader=ChoiceLoader([FileSystemLoader(project.current().root / OWN), FileSystemLoader(OURS)]),
        undefined=StrictUndefined,
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "python": repr, "sql": quoted}
    return made


def _rendered(environment: Environment, name: str, values: Mapping[str, Any]) -> str:
    try:
        return environment.get_template(name).render(values)
    except TemplateError as error:
        remedy = f"correct it in {OWN}, or delete it there"
        raise Failure(f"template {name}: {error}", remedy, code="template-unusable") from None


def _target(path: str) -> Path:
    """A path of the project; folders that it keeps elsewhere are looked up."""
    ours = project.current()
    first, _, rest = path.partition("/")
    sinks = ours.root.joinpath(*ours.sinks_package.split("."))
    folders = {"events": ours.events, "migrations": ours.migrations, "sinks": sinks}
    return folders.get(first, ours.root / first) / rest


def _formatted(text: str) -> str:
    """Python as `make check` wants it: how long a line gets depends on names."""
    if not text.strip() or importlib.util.find_spec("ruff") is None:
        return text
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "-"]
    root = project.current().root
    done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=root, check=False, timeout=60)
    return text if done.returncode else done.stdout
