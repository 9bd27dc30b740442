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


def published(of: Project, revision: str, partitions: int) -> Catalog:
    """The catalog of a project at a revision, without what it declared as not published; empty if there was nothing.

    Raises Failure if there is no git, no repository or no such revision, or if the events cannot be read there.
    """
    top, prefix, _ = _git(of.root, "rev-parse", "--show-toplevel", "--show-prefix").decode().split("\n")
    commit = _commit(of.root, revision)
    with tempfile.TemporaryDirectory() as copy:
        try:
            table = _table(of.root, commit)
            events = Path(of.root, table.get("events", Path(table.get("connect", "connect"), "events")))
            inside = os.path.normpath(Path(prefix, os.path.relpath(events, of.root)))
            if _git(Path(top), "ls-tree", "-d", commit, "--", inside):
                archive = _git(Path(top), "archive", "--format=tar", commit, "--", inside)  # it refuses ".." in a tree
                subprocess.run(["tar", "-x", "-C", copy], input=archive, check=True)
            found = catalog.load(Path(copy, inside), table.get("topic-prefix", Project.topic_prefix), partitions)
        except Failure as failure:
            if failure.code == "git-failed":
                raise
            problem = failure.message.replace(str(Path(copy).resolve()), "").replace(copy, "")
            raise Failure(
                f"the events of {revision} cannot be read: {problem}",
                "compare with a revision whose events were in use",
                code="revision-unusable",
            ) from None
    return Catalog(found.folder, {name: one for name, one in found.aggregates.items() if one.published})


def _table(root: Path, commit: str) -> dict[str, Any]:
    """The table [tool.outbox] of that time: it may have named another folder, or another prefix of the topics."""
    try:
        content = _git(root, "show", f"{commit}:./{project.FILE}").decode()
    except Failure:
        return {}
    try:
        table: dict[str, Any] = tomllib.loads(content).get("tool", {}).get("outbox", {})
    except ValueError as error:
        raise Failure(f"{project.FILE}: {error}", code="project-wrong") from None
    return table


def _commit(root: Path, revision: str) -> str:
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
