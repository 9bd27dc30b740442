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
MADE = re.compile(r'\bCREATE\s+(?:OR\s+REPLACE\s+|UNLOGGED\s+)?(?:TABLE|VIEW)\s+(?:IF NOT EXISTS\s+)?([\w."]+)', re.I)
TOKEN = re.compile(r"""\(|\)|,|'[^']*'|"[^"]*"|[^\s(),'"]+""")
COMMENT = re.compile(r"--[^\n]*")


class Migration(NamedTuple):
    """The place of a new migration in a history. The first one of a project begins a branch beside the machinery's."""

    number: str
    revision: str
    down_revision: str | None
    branch_labels: tuple[str, ...] | None
    depends_on: tuple[str, ...] | None


def following(database: Database) -> Migration:
    """The migration after the project's newest. Raises Failure if the history has two ends."""
    files = _files(database)
    texts = [file.read_text("utf-8") for file in files]
    found = [(kind, name) for text in texts for kind, name in REVISION.findall(text)]
    revisions, followed = ({name for kind, name in found if bool(kind) is is_down} for is_down in (False, True))
    heads = sorted(revisions - followed)
    if len(heads) > 1:
        raise Failure(
            f"the migrations of database {database} have {len(heads)} ends: {', '.join(heads)}",
            "let one of them follow the other by `down_revision`",
            code="migrations-branch",
        )
    numbers = [int(begin[0]) for file in files if (begin := re.match(r"\d+", file.name))]
    number = max([len(files), *numbers], default=0) + 1
    while f"{database}_domain_{number:04}" in revisions:
        number += 1
    revision = f"{database}_domain_{number:04}"
    if heads:
        return Migration(f"{number:04}", revision, heads[0], None, None)
    return Migration(f"{number:04}", revision, None, ("domain",), (f"{database}_machinery_0001",))


def require_free(database: Database, name: str) -> None:
    """Raises Failure if a migration makes a table or a view of this name already."""
    for file in [*_files(database), *(MACHINERY / database).glob("*.py")]:
        made = {one.replace('"', "").removeprefix("public.").lower() for one in MADE.findall(file.read_text("utf-8"))}
        if name in made:
            raise Failure(
                f"{file.name} of database {database} makes {name} already",
                "choose another name, or another table with --table",
                code="name-taken",
            )


def view_columns(view: str | None) -> set[str]:
    """The columns of a view of the source database, from the migration that makes it; empty if that cannot be read."""
    statement = rf'VIEW\s+(?:public\.)?"?{re.escape(view or "")}"?\s+AS\s+SELECT\b(.*?);'
    text = COMMENT.sub("", "\n".join(file.read_text("utf-8") for file in _files("source")))
    found = re.findall(statement, text, re.IGNORECASE | re.DOTALL)
    names, depth, last = set[str](), 0, ""
    for word in TOKEN.findall(found[-1]) if found else ():
        depth += {"(": 1, ")": -1}.get(word, 0)
        if depth == 0 and word.upper() in {",", "FROM"}:
            names.add(last.rpartition(".")[2].strip('"').lower())
            if word != ",":
                break
        last = word
    return names


def _files(database: Database) -> list[Path]:
    return sorted((project.current().migrations / database).glob("*.py"))
