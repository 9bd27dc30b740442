"""The declared events as a git revision has them: what was published."""

from __future__ import annotations

import os
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.project import Project
from outbox.events import catalog
from outbox.events.catalog import Catalog

TIMEOUT_S = 60
FOLDER = "events"  # of the copy


def published(of: Project, revision: str, partitions: int) -> Catalog:
    """The catalog of a project at a revision, without what it declared as not published; empty if there was nothing.

    Raises Failure if there is no git, no repository or no such revision, or if the events cannot be read there.
    """
    top = Path(_git(of.root, "rev-parse", "--show-toplevel").decode().removesuffix("\n"))
    commit = _commit(of.root, revision)
    with tempfile.TemporaryDirectory() as copy:
        try:
            names = _names(of, commit)
            if tree := _tree(of.root, commit, _events(of, names)):
                archive = _git(top, "archive", "--format=tar", f"--prefix={FOLDER}/", tree)  # it refuses ".." in it
                subprocess.run(["tar", "-x", "-C", copy], input=archive, check=True)
            prefix = names.get("topic-prefix", Project.topic_prefix)
            found = catalog.load(Path(copy, FOLDER), prefix, partitions)
            aggregates = {name: one for name, one in found.aggregates.items() if one.published}
            return Catalog(found.folder, aggregates)
        except Failure as failure:
            if failure.code == "git-failed":
                raise
            problem = failure.message.replace(str(Path(copy).resolve()), "").replace(copy, "")
            raise Failure(
                f"the events of {revision} cannot be read: {problem}",
                "compare with a revision whose events were in use",
                code="revision-unusable",
            ) from None


def _commit(root: Path, revision: str) -> str:
    try:
        return _git(root, "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}").decode().strip()
    except Failure:
        raise Failure(
            f"this clone has no revision {revision}",
            f"name a commit, a tag or a branch; of a shallow clone or of others, first: git fetch origin {revision}",
            code="revision-unknown",
        ) from None


def _names(of: Project, commit: str) -> dict[str, Any]:
    """The table [tool.outbox] of that time: it may have named another folder, or another prefix of the topics."""
    try:
        content = _git(of.root, "show", f"{commit}:./{project.FILE}").decode()
    except Failure:
        return {}
    try:
        table: dict[str, Any] = tomllib.loads(content).get("tool", {}).get("outbox", {})
    except ValueError as error:
        raise Failure(f"{project.FILE}: {error}", code="project-wrong") from None
    return table


def _events(of: Project, names: dict[str, Any]) -> Path:
    return Path(of.root, names.get("events", Path(names.get("connect", "connect"), "events")))


def _tree(root: Path, commit: str, folder: Path) -> str | None:
    """The id of a folder's tree in a commit; None if it did not exist."""
    listed = _git(root, "ls-tree", "-d", commit, "--", os.path.relpath(folder, root)).split()
    return listed[2].decode() if listed else None


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
