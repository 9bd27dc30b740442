"""The project's migrations of one database, read as text: what comes next, and the tables and views that they make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

import outbox
from outbox.base import project
from outbox.base.errors import Failure

Database = Literal["source", "sink"]
MACHINERY = Path(str(outbox.__file__)).with_name("migrations")
REVISION = re.compile(r"""^(down_)?revision\b[^=\n]*=\s*\(?\s*["']([^"']+)["']""", re.MULTILINE)
MADE = r'(?i)\bCREATE\s+(?:OR REPLACE\s+|UNLOGGED\s+)?(?:TABLE|VIEW)\s+(?:IF NOT EXISTS\s+)?(?:public\.)?"?{}\b'


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
