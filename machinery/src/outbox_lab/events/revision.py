"""The declared events as a git revision has them: what was published."""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.project import Project
from outbox.events import catalog
from outbox.events.catalog import Catalog

TIMEOUT_S = 60


def published(of: Project, revision: str, partitions: int) -> Catalog:
    """The catalog of a project at a revision, without what it declared as not published; empty if there was nothing.

    Raises Failure if there is no git, no repository or no such revision, or if the events cannot be read there.
    """
    commit = _commit(of.root, revision)
    with tempfile.TemporaryDirectory() as copy:
        if _git(of.root, "ls-tree", commit):  # the project's folder existed
            archive = _git(of.root, "archive", "--format=tar", commit)
            subprocess.run(["tar", "-x", "-C", copy], input=archive, check=True)
        try:
            found = _declared(Path(copy).resolve(), partitions)
        except (Failure, ValueError) as error:
            problem = (error.message if isinstance(error, Failure) else str(error)).replace(
                str(Path(copy).resolve()), ""
            )
            raise Failure(
                f"the events of {revision} cannot be read: {problem}",
                "compare with a revision whose events were in use",
                code="revision-unusable",
            ) from None
    return Catalog(found.folder, {name: one for name, one in found.aggregates.items() if one.published})


def _declared(root: Path, partitions: int) -> Catalog:
    """The catalog in a copy. The project may have named another folder then, or another prefix of its topics."""
    file = root / project.FILE
    table = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("outbox", {}) if file.exists() else {}
    events = Path(root, table.get("events", Path(table.get("connect", "connect"), "events"))).resolve()
    if not events.is_relative_to(root):
        raise ValueError(f"{events} is outside of the project")
    return catalog.load(events, table.get("topic-prefix", Project.topic_prefix), partitions)


def _commit(root: Path, revision: str) -> str:
    _git(root, "rev-parse", "--show-toplevel")  # says so if this is no repository
    try:
        return _git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    except Failure:
        raise Failure(
            f"this clone has no revision {revision}",
            f"name a commit, a tag or a branch; of a shallow clone or of others, first: git fetch origin {revision}",
            code="revision-unknown",
        ) from None


def _git(folder: Path, *arguments: str) -> bytes:
    """Output of a git command. Raises Failure with its message."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise Failure("there is no git here", "install it, or leave --against out", code="git-failed") from None
    except subprocess.TimeoutExpired:
        raise Failure(f"git {arguments[0]} did not end in {TIMEOUT_S} s", code="git-failed") from None
    if done.returncode != 0:
        problem = done.stderr.decode(errors="replace").strip().splitlines()
        raise Failure(
            f"git {arguments[0]} in {folder}: {problem[0] if problem else f'status {done.returncode}'}",
            "run the command in the repository's clone",
            code="git-failed",
        )
    return done.stdout
