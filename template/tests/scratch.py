"""Copies of this repository without some of its parts, and programs run in them.

    python -m template.tests.scratch machinery [ARGUMENT …]

runs the machinery's tests as a project has them that has deleted the sample, with further arguments for pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from outbox.testing import homes

from template.tests.paths import ROOT

# What a project that begins with a domain of its own deletes.
SAMPLE = (
    "service",
    "sinks",
    "migrations/source",
    "migrations/sink",
    "connect/events",
    "connect/changes.json",
    "demo",
    "bench",
    "monitoring",
    "tests/sample",
    "tests/template",
    "template",
    "copier.yml",
)
SITE = Path(__file__).with_name("site")
COMPILED = ROOT / ".venv" / "pycache"


def copy(folder: Path, without: Sequence[str] = ()) -> Path:
    """Copy the files that git knows, or would add, but for some files and folders; return the folder.

    Raises FileNotFoundError for a part that does not exist: a list of parts must not outlive them.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    files = {Path(name.decode()) for name in listed.split(b"\0") if name}
    for part in without:
        gone = {file for file in files if file.is_relative_to(part)}
        if not gone:
            raise FileNotFoundError(part)
        files -= gone
    for file in files:
        if os.path.lexists(ROOT / file):  # deleted, and not yet committed
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, folder / file, follow_symlinks=False)
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python module in a copy, its output captured."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)


def environment(folder: Path) -> dict[str, str]:
    """Our environment without its project and the checkout's packages, and with the copy's."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_PROJECT")}
    path = os.pathsep.join(map(str, [SITE, folder]))
    # What Python compiles stays out of the copy, and is kept for the next process.
    return {**ours, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(COMPILED)}


def clean() -> None:
    """Delete what Python has compiled of copies, all of which are below the folder for temporary files."""
    shutil.rmtree(COMPILED / Path(tempfile.gettempdir()).relative_to("/"), ignore_errors=True)


def main(suite: str, *arguments: str) -> int:
    """Run a suite in a copy without the sample. Returns pytest's exit status. Logs of its stacks outlive the copy."""
    with tempfile.TemporaryDirectory(prefix="outbox machinery ") as temporary:
        folder = copy(Path(temporary, "copy"), SAMPLE)
        command = [sys.executable, "-m", "pytest", f"tests/{suite}", *arguments]
        variables = {**environment(folder), homes.VARIABLE: str(homes.all_homes())}
        try:
            return subprocess.run(command, cwd=folder, env=variables, check=False).returncode
        finally:
            clean()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
