"""A change of the project's files: made from templates, and written as a whole or not at all. And the project's
migrations, read as text: what comes next, and the tables and views that they make.

Each template of a folder becomes the file of the same path in the project: ``state/sinks/MODULE/job.py.j2`` becomes
``job.py`` in a folder of ``sinks``. Words in capitals are values. A template that renders to nothing writes no file,
and an empty template writes an empty one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from sqlalchemy.dialects import postgresql

import outbox
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.events import catalog
from outbox.events.catalog import Catalog

TEMPLATES = Path(__file__).with_name("files")
SUFFIX = ".j2"
NEXT = f"next{SUFFIX}"
Database = Literal["source", "sink"]
MACHINERY = Path(str(outbox.__file__)).with_name("migrations")
REVISION = re.compile(r"""^(down_)?revision\b[^=\n]*=\s*\(?\s*["']([^"']+)["']""", re.MULTILINE)
MADE = r'(?i)\bCREATE\s+(?:OR REPLACE\s+|UNLOGGED\s+)?(?:TABLE|VIEW)\s+(?:IF NOT EXISTS\s+)?(?:public\.)?"?{}\b'
quoted = postgresql.dialect().identifier_preparer.quote  # type: ignore[no-untyped-call]
_environment = Environment(
    loader=FileSystemLoader(TEMPLATES),
    undefined=StrictUndefined,
    autoescape=select_autoescape(),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_environment.filters |= {"json": lambda value: json.dumps(value, ensure_ascii=False), "python": repr, "sql": quoted}


@dataclass
class Change:
    """New files, and existing ones with what they become."""

    new: dict[Path, str] = field(default_factory=dict)
    edited: dict[Path, str] = field(default_factory=dict)
    next_steps: list[str] = field(default_factory=list)

    def write(self) -> None:
        """Write everything. Raises Failure, with nothing written, if a new file exists or a folder refuses."""
        if existing := [shown(file) for file in self.new if os.path.lexists(file)]:
            problem = f"{existing[0]} exists already, one of {len(existing)} such files"
            raise Failure(problem, "choose another name, or delete it; nothing was written", code="file-exists")
        before = {file: file.read_text("utf-8") for file in self.edited}
        done = list[Path]()
        try:
            for file, text in {**self.new, **self.edited}.items():
                _make_folder(file.parent)
                done.append(file)
                file.write_text(text, "utf-8")
                if file in self.new:
                    shutil.copymode(project.current().root / project.FILE, file)  # a command has a strict umask
        except OSError as error:
            for file in done:
                file.write_text(before[file], "utf-8") if file in before else file.unlink(missing_ok=True)
            problem = f"{error.filename or 'a file'}: {error.strerror}"
            raise Failure(problem, "nothing was written", code="files-unwritable") from None

    def declared(self, settings: Settings) -> Catalog:
        """The events as they would be. Raises Failure if they cannot be used."""
        ours = project.current().events
        with tempfile.TemporaryDirectory() as temporary:
            copy = Path(temporary, "events")
            if ours.is_dir():
                shutil.copytree(ours, copy, ignore=shutil.ignore_patterns("__pycache__"))
            for file, text in {**self.new, **self.edited}.items():
                if file.is_relative_to(ours):
                    target = copy / file.relative_to(ours)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text, "utf-8")
            try:
                return catalog.load(copy, settings.topic_prefix, settings.topic_partitions)
            except Failure as failure:
                message = failure.message.replace(f"{copy}/", "")
                raise Failure(message, failure.remedy, code=failure.code) from None


def render(folder: str, values: Mapping[str, Any]) -> dict[Path, str]:
    """The files that a folder of templates makes, by their paths in the project."""
    found = dict[Path, str]()
    for template in sorted((TEMPLATES / folder).rglob(f"*{SUFFIX}")):
        name = template.relative_to(TEMPLATES / folder).as_posix()
        text = "" if name == NEXT else _environment.get_template(f"{folder}/{name}").render(values)
        if text.strip() or not template.stat().st_size:
            path = re.sub("[A-Z]+", lambda word: str(values[word[0].lower()]), name.removesuffix(SUFFIX))
            file = _target(path)
            found[file] = _formatted(text) if file.suffix == ".py" else text
    return found


def next_steps(folder: str, values: Mapping[str, Any]) -> list[str]:
    """The next steps after the files of a folder are written, a line each."""
    return list(filter(str.strip, _environment.get_template(f"{folder}/{NEXT}").render(values).splitlines()))


def shown(file: Path) -> str:
    """A path as people read it: from the project's folder."""
    root = project.current().root
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)


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


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir()
        shutil.copymode(project.current().root, folder)


class Migration(NamedTuple):
    """The place of a new migration. The first one of a project begins a branch beside the machinery's."""

    number: str
    revision: str
    down_revision: str | None
    branch_labels: tuple[str, ...] | None = None
    depends_on: tuple[str, ...] | None = None


def following(database: Database, *names: str) -> Migration:
    """The migration after the project's newest, which makes tables or views of these names.

    Raises Failure if another one makes such a table or view, or if the history has two ends.
    """
    files = sorted((project.current().migrations / database).glob("*.py"))
    for file in [*files, *(MACHINERY / database).glob("*.py")]:
        for name in names:
            if re.search(MADE.format(name), file.read_text("utf-8")):
                remedy = "choose another name, or another table with --table"
                raise Failure(f"{file.name} of database {database} makes {name} already", remedy, code="name-taken")
    found = [pair for file in files for pair in REVISION.findall(file.read_text("utf-8"))]
    revisions, followed = ({name for down, name in found if bool(down) is is_down} for is_down in (False, True))
    if len(heads := sorted(revisions - followed)) > 1:
        problem = f"migrations of database {database} have several ends: {', '.join(heads)}"
        raise Failure(problem, "let one of them follow the other by `down_revision`", code="migrations-branch")
    numbers = [int(begin[0]) for file in files if (begin := re.match(r"\d+", file.name))]
    number = f"{max([len(files), *numbers], default=0) + 1:04}"
    if heads:
        return Migration(number, f"{database}_domain_{number}", heads[0])
    return Migration(number, f"{database}_domain_{number}", None, ("domain",), (f"{database}_machinery_0001",))


def view_columns(view: str | None) -> set[str]:
    """The columns of a view of the source database, from the migration that makes it; empty if that cannot be read."""
    files = sorted((project.current().migrations / "source").glob("*.py"))
    text = re.sub(r"--[^\n]*", "", "\n".join(file.read_text("utf-8") for file in files))
    found = re.findall(rf'(?is)VIEW\s+(?:public\.)?"?{view}"?\s+AS\s+SELECT\b(.*?);', text)
    selected, nested = re.sub("'[^']*'", "", found[-1]) if found else "", 1
    while nested:
        selected, nested = re.subn(r"\([^()]*\)", "", selected)
    columns = re.split(r"(?i)\bFROM\b", selected)[0].split(",") if found else []
    return {re.split(r"[\s.]+", column.strip())[-1].strip('"').lower() for column in columns}
