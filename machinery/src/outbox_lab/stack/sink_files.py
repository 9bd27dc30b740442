"""The files of each sink, by its name: prints them as JSON.

A process of its own, because the project's modules change while `outbox dev` runs.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.base import project
from outbox.base.settings import load
from outbox.sink import discovery
from outbox.sink.spec import SinkJob


def read() -> Mapping[str, Sequence[Path]] | None:
    """By sink the folders and files that it is made of; None if the project's modules cannot be imported."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project.current().root)
    if done.returncode:
        return None
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return {name: [Path(path) for path in paths] for name, paths in found.items()}


def _files(folder: Path, job: SinkJob) -> list[str]:
    """The job's folder, and what it names outside."""
    found = [folder, job.projections]
    if isinstance(job.strategy, Path):
        found.append(job.strategy.resolve())
    if job.transform and (module := importlib.util.find_spec(job.transform.partition(":")[0])):
        found.append(Path(str(module.origin)))
    return [str(path) for path in found]


if __name__ == "__main__":
    project.make_importable()
    print(json.dumps({job.name: _files(folder, job) for folder, job in discovery.declared(load())}))  # noqa: T201
