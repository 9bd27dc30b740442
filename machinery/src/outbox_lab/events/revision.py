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
BLOB_MODES = ("100644", "100755")


def published(of: Project, revision: str, partitions: int) -> Catalog:
    """The catalog of a project at a revision, without what it declared as not published; empty if there was nothing.

    Raises Failure if there is no git, no repository or no such revision, or if the events cannot be read there.
    """
    top = Path(_git(of.root, "rev-parse", "--show-toplevel").decode().removesuffix("\n"))
    commit = _commit(of.root, revision)
    with tempfile.TemporaryDirectory() as copy:
        try:
            names = _names(of, commit)
            _copy(top, commit, _within(_events(of, names), top), Path(copy, "events"))
            prefix = names.get("topic-prefix", Project.topic_prefix)
            found = catalog.load(Path(copy, "events"), prefix, partitions)
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
    except Failure as failure:
        if failure.code != "git-failed":
            raise
        is_shallow = _git(root, "rev-parse", "--is-shallow-repository").strip() == b"true"
        raise Failure(
            f"this clone has no revision {revision}",
            f"it is shallow: git fetch --depth=1 origin {revision}, or fetch all of it (fetch-depth: 0)"
            if is_shallow
            else "name a commit, a tag or a branch; git fetch brings those of others",
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


def _within(folder: Path, top: Path) -> str:
    try:
        return folder.resolve().relative_to(top.resolve()).as_posix()
    except ValueError:
        raise Failure(
            f"{folder} is not in the repository {top}", "run the command in the repository's clone", code="git-failed"
        ) from None


def _copy(top: Path, commit: str, folder: str, into: Path) -> None:
    """Write the files of a folder of a commit; none if it did not exist."""
    listed = _git(top, "ls-tree", "-r", "-z", "--full-tree", commit, "--", f"{folder}/").decode()
    for line in filter(None, listed.split("\0")):
        meta, _, path = line.partition("\t")
        mode, _, blob = meta.split()
        if mode in BLOB_MODES:
            within = Path(path).relative_to(folder)
            if ".." in within.parts:  # git stores such a tree, and checks none out
                raise Failure(f"{path} leads out of its folder")
            target = into / within
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(_git(top, "cat-file", "blob", blob))


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
