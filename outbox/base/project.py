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
from typing import Any

from outbox.base.errors import Failure

VARIABLE = "OUTBOX_PROJECT"  # names the project's folder, for an installed `outbox` or a second project
FILE = "pyproject.toml"
FOLDERS: tuple[str, ...] = ("connect", "migrations")


@dataclass(frozen=True)
class Project:
    """The names of a project. Each default fits a project that follows the layout of this repository."""

    root: Path
    source_database: str = "source"
    """The service's database; also the prefix of its roles, as in ``source_owner``."""
    sink_database: str = "sink"
    """The sinks' database; also the prefix of its roles."""
    topic: str = "events"
    connector: str = "outbox"
    """The Debezium connector and its replication slot. Projects that share a Postgres server need different names."""
    service: str = "service.app:create_app"
    """The function that makes the WSGI application, as ``module:function``; without arguments."""
    sinks: str = "sinks"
    """The package whose subpackages declare the sink jobs, each in a module ``job``."""
    strategies: tuple[str, ...] = ("dedup",)
    """What ``outbox sink`` runs unless it is given strategies."""
    folders: dict[str, Path] = field(default_factory=dict)
    """Folders that are elsewhere than in the root: ``connect`` or ``migrations``."""

    @property
    def connect(self) -> Path:
        """The files of connectors, worker and broker."""
        return self.folders.get("connect", self.root / "connect")

    @property
    def migrations(self) -> Path:
        """The project's own migrations: folders ``source`` and ``sink``."""
        return self.folders.get("migrations", self.root / "migrations")

    @property
    def home(self) -> Path:
        """The default folder of everything that the commands write."""
        return self.root / ".outbox"


def current() -> Project:
    """The project that ``OUTBOX_PROJECT`` names; else the one around this package; else the one around the working
    directory. Raises Failure if there is none, or if its table has a key that is not known.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return load(Path(named).absolute())
    around = Path(__file__).resolve().parent.parent.parent
    for folder in (around, *(Path.cwd() / "any").parents):
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
    values = {key.replace("-", "_"): value for key, value in table.items()}
    folders = {name: (root / values.pop(name)).resolve() for name in FOLDERS if name in values}
    known = {name for name in Project.__dataclass_fields__ if name not in ("root", "folders")}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise Failure(
            f"{root / FILE}: [tool.outbox] does not know {', '.join(unknown)}",
            f"known are {', '.join(sorted(name.replace('_', '-') for name in known))}, connect, migrations",
            code="project-wrong",
        )
    strategies = values.pop("strategies", Project.strategies)
    is_list = isinstance(strategies, (list, tuple)) and all(isinstance(name, str) for name in strategies)
    if not (is_list and strategies):
        raise Failure(
            f"{root / FILE}: strategies in [tool.outbox] is {strategies!r} and must be a list of names",
            'correct it, for example to strategies = ["dedup"]',
            code="project-wrong",
        )
    return Project(root=root, folders=folders, strategies=tuple(strategies), **values)


def make_importable() -> None:
    """Let this process, and those that it starts, import the project's packages.

    Raises Failure if there is no project.
    """
    root = str(current().root)
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
