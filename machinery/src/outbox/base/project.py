"""The project that the machinery works for: its folder, and every name that it chose.

The names stand in one place, the table ``[tool.outbox]`` of the project's ``pyproject.toml``. Nothing else in the
machinery knows the project's domain.
"""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from outbox.base.errors import Failure

VARIABLE = "OUTBOX_PROJECT"  # names the project's folder, for programs that run elsewhere
FILE = "pyproject.toml"
FOLDERS: tuple[str, ...] = ("connect", "events", "migrations")


@dataclass(frozen=True)
class Project:
    """The names of a project. Each default fits a project that follows the layout of this repository."""

    root: Path
    source_database: str = "source"
    """The service's database; also the prefix of its roles, as in ``source_owner``."""
    sink_database: str = "sink"
    """The sinks' database; also the prefix of its roles."""
    topic_prefix: str = "outbox"
    """The topic of an aggregate type is called ``<topic-prefix>.<aggregate type>``, unless it has a name of its own."""
    connector: str = "outbox"
    """The Debezium connector and its replication slot. Projects that share a Postgres server need different names."""
    cloudevents_source: str = ""
    """The beginning of the source of events as CloudEvents; without it, records have no headers of CloudEvents."""
    service: str = "service.app:create_app"
    """The function that makes the WSGI or ASGI application, as ``module:function``; without arguments."""
    web: Literal["flask", "fastapi"] = "flask"
    """The framework of the service: which packages `make install` installs, and the image of the service has."""
    sinks: tuple[str, ...] = ()
    """The sinks that ``outbox sink`` runs unless it is given names."""
    sinks_package: str = "sinks"
    """The package whose subpackages declare the sink jobs, each in a module ``job``."""
    handlers: str = "handlers"
    """The module whose handlers ``outbox handle`` calls; a project need not have one."""
    workload: str = "demo.workload:Workload"
    """The class that plans what the clients of the walkthrough send; as ``module:class``."""
    player: str = ""
    """The class that plays the walkthrough; as ``module:class``. The default shows it on the terminal."""
    soak: str = "demo.soak:Domain"
    """The class that tells the soak what the clients send and what must hold; as ``module:class``."""
    payloads: str = "service/payloads.py"
    """The module that ``outbox events types`` writes; where it does not exist, nothing asks for it."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Folders that are elsewhere than by default: ``connect``, ``events`` or ``migrations``."""

    @property
    def connect(self) -> Path:
        return self.folders.get("connect", self.root / "connect")

    def file(self, ours: Path) -> Path:
        """The project's own file of this name in its folder ``connect``, or else ours."""
        own = self.connect / ours.name
        return own if own.exists() else ours

    @property
    def events(self) -> Path:
        """The declared events (`outbox.events.catalog`)."""
        return self.folders.get("events", self.connect / "events")

    @property
    def migrations(self) -> Path:
        return self.folders.get("migrations", self.root / "migrations")

    @property
    def home(self) -> Path:
        """The default folder of everything that the commands write."""
        return self.root / ".outbox"


def current() -> Project:
    """The project that ``OUTBOX_PROJECT`` names; else the one around the working directory.

    Raises Failure if no project is found, or if its table has an unknown key.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return load(Path(named).absolute())
    for folder in (Path.cwd() / "any").parents:
        if _table(folder) is not None:
            return load(folder)
    raise Failure(
        f"there is no {FILE} with a table [tool.outbox] here",
        f"run the command in the project's folder, or name that folder in {VARIABLE}",
        code="project-missing",
    )


@cache
def load(root: Path) -> Project:
    """The project of a folder. Raises Failure if the folder has none, or if its table is wrong."""
    table = _table(root)
    if table is None:
        raise Failure(f"{root / FILE} has no table [tool.outbox]", f"correct {VARIABLE}", code="project-missing")
    values: dict[str, Any] = {key.replace("-", "_"): value for key, value in table.items()}
    folders = {name: (root / values.pop(name)).resolve() for name in FOLDERS if name in values}
    known = {name for name in Project.__dataclass_fields__ if name not in ("root", "folders")}
    unknown = sorted(values.keys() - known)
    if unknown:
        names = sorted(name.replace("_", "-") for name in {*known, *FOLDERS})
        raise _wrong(root, f"does not know {', '.join(unknown)}", f"known are {', '.join(names)}")
    types = get_type_hints(Project)
    for name, value in values.items():
        try:
            values[name] = msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise _wrong(root, f"has {name.replace('_', '-')} = {value!r}", str(error)) from None
    return Project(root=root, folders=folders, **values)


def _wrong(root: Path, problem: str, remedy: str) -> Failure:
    return Failure(f"{root / FILE}: [tool.outbox] {problem}", remedy, code="project-wrong")


def make_importable() -> None:
    """Let this process, and those that it starts, know the project and import its packages.

    Raises Failure if there is no project.
    """
    root = str(current().root)
    os.environ[VARIABLE] = root
    if root not in sys.path:
        sys.path.insert(0, root)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, *inherited]))


def _table(folder: Path) -> dict[str, Any] | None:
    try:
        content = tomllib.loads((folder / FILE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"{folder / FILE}: {error}", "correct the file", code="project-wrong") from None
    table: dict[str, Any] | None = content.get("tool", {}).get("outbox")
    return table
