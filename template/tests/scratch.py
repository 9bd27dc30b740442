"""Copies of this repository, and programs run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from template.tests.paths import ROOT

SITE = Path(__file__).with_name("site")
COMPILED = ROOT / ".venv" / "pycache"


def copy(folder: Path, *places: str) -> Path:
    """Copy the files that git knows, or would add, of these places, everything by default; return the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    files = {Path(name.decode()) for name in listed.split(b"\0") if name}
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
    ours = {name: value for name, value in without_make().items() if not name.startswith("OUTBOX_PROJECT")}
    path = os.pathsep.join(map(str, [SITE, folder, folder / "machinery" / "src"]))
    # What Python compiles stays out of the copy, and is kept for the next process.
    return {**ours, "PYTHONPATH": path, "PYTHONPYCACHEPREFIX": str(COMPILED)}


def without_make() -> dict[str, str]:
    """Our environment for another make, which takes no options and jobs of the one that has started us."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def clean() -> None:
    """Delete what Python has compiled of copies, all of which are below the folder for temporary files."""
    shutil.rmtree(COMPILED / Path(tempfile.gettempdir()).relative_to("/"), ignore_errors=True)
