"""Try the mutations: ``python -m proof.mutations [NAME…]``. Status 1 if no test has noticed one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900
NO_TESTS_FAILED, TESTS_FAILED = 0, 1  # https://docs.pytest.org/en/stable/reference/exit-codes.html
Result = Literal["caught", "not caught", "no verdict"]


@dataclass(frozen=True)
class Mutation:
    """One text of one file that is replaced, and the tests of which one must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]
    suite: str = "machinery"

    def apply(self, root: Path) -> None:
        """Replace the text. Raises ValueError unless the file has it exactly once."""
        file = root / self.file
        text = file.read_text()
        if not self.old or text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has the text {text.count(self.old)} times")
        file.write_text(text.replace(self.old, self.new))


def every() -> list[Mutation]:
    """All mutations, in the order of their files."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return [Mutation(**one) for file in files for one in tomllib.loads(file.read_text())["mutation"]]


def attempt(mutation: Mutation | None, tests: Sequence[str], suite: str) -> Result:
    """Run tests on a copy of the repository with the mutation, or without any."""
    with tempfile.TemporaryDirectory(prefix="mutation ") as folder:
        copy = Path(folder) / "repository"
        _copy(copy)
        if mutation is not None:
            mutation.apply(copy)
        path = os.pathsep.join([str(copy / "machinery" / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *tests],
            cwd=copy / suite,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if done.returncode not in (NO_TESTS_FAILED, TESTS_FAILED):
            print(done.stdout[-3000:], done.stderr[-3000:])  # noqa: T201
            return "no verdict"
        return "caught" if done.returncode == TESTS_FAILED else "not caught"


def _copy(to: Path) -> None:
    """The files that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, to / name
        if source.is_file() or source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _results(chosen: Sequence[Mutation]) -> Iterator[tuple[Mutation, Result]]:
    for number, mutation in enumerate(chosen, start=1):
        began = time.monotonic()
        result = attempt(mutation, mutation.tests, mutation.suite)
        print(  # noqa: T201
            f"{number} of {len(chosen)}: {mutation.name}: {result} after {time.monotonic() - began:.0f} s", flush=True
        )
        yield mutation, result


def main(names: Sequence[str]) -> int:
    """Try those whose names contain one of these texts, or all."""
    chosen = [one for one in every() if not names or any(name in one.name for name in names)]
    missed = [mutation.name for mutation, result in _results(chosen) if result != "caught"]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations were caught")  # noqa: T201
    for name in missed:
        print(f"not caught: {name}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
