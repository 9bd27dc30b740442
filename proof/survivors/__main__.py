"""Let mutmut change the pure parts, and show what no unit test notices: ``python -m proof.survivors [PART…]``.

mutmut makes some thousand small changes of the files that ``setup.cfg`` names. A sample of them is tried; the seed says
which. A part is the beginning of a module's name, such as ``outbox_lab.soak``: then all changes in it are tried.

Status 0 if it ran. A survivor is something to look at: many change only what a message says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from proof.mutations.mutation import ROOT
from proof.mutations.trial import copy_of

HERE = Path(__file__).parent
MUTMUT = "mutmut==3.8.1"
PACKAGES = ROOT / ".venv" / "survivors"  # beside the packages of the project, which need no other versions for it
# mutmut's own packages come last on the path, so that pytest and its plugins are the project's.
RUN = f"import sys; sys.path.append({str(PACKAGES)!r}); from mutmut.__main__ import cli; cli()"
NO_MUTANT = "generate"  # mutmut generates all mutants before it finds that none has this name
SURVIVED, WITHOUT_TEST = 0, 33  # mutmut's exit codes; None: not tried
RESULTS = {SURVIVED: "survived", WITHOUT_TEST: "no test", None: "not tried", -24: "timeout", 36: "timeout"}

Codes = dict[str, int | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try mutants and print the survivors."""
    options = _parser().parse_args(arguments)
    _install()
    with copy_of(ROOT) as copy:
        folder = copy / "machinery"
        shutil.copy(HERE / "setup.cfg", folder)
        _mutmut(folder, 600, "run", NO_MUTANT)
        chosen = _choose(_codes(folder), options.parts, options.sample, options.seed)
        print(f"trying {len(chosen)} mutants, seed {options.seed}", flush=True)  # noqa: T201
        _mutmut(folder, options.seconds, "run", "--max-children", "1", *chosen)
        codes = {name: code for name, code in _codes(folder).items() if name in chosen}
        for name in sorted(name for name, code in codes.items() if code == SURVIVED):
            print(f"\nsurvived: {name}")  # noqa: T201
            print("\n".join(_changed(_mutmut(folder, 60, "show", name))), flush=True)  # noqa: T201
    counts = Counter(RESULTS.get(code, "caught") for code in codes.values())
    print("\n" + ", ".join(f"{count} {result}" for result, count in counts.most_common()))  # noqa: T201
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m proof.survivors", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="modules to try whole, as outbox_lab.soak")
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="without a part: how many mutants to try")
    parser.add_argument("--seed", type=int, default=25, help="which ones")
    parser.add_argument("--seconds", type=float, default=1800, metavar="N", help="stop trying after N seconds")
    return parser


def _install() -> None:
    """Install mutmut once."""
    if not (PACKAGES / "mutmut").exists():
        uv = Path(sys.executable).with_name("uv")
        subprocess.run(
            [uv, "pip", "install", "-q", "--python", sys.executable, "--target", PACKAGES, MUTMUT], check=True
        )


def _mutmut(folder: Path, timeout_s: float, *words: str) -> str:
    """Run a command of mutmut; returns its output. It ends after ``timeout_s``, and what was tried by then counts."""
    environment = {**os.environ, "PYTHONPATH": ""}  # it finds the mutated package by its own path
    with (
        contextlib.suppress(subprocess.TimeoutExpired),
        subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        try:
            return process.communicate(timeout=timeout_s)[0]
        finally:
            process.terminate()
    return ""


def _codes(folder: Path) -> Codes:
    """By name of each mutant, mutmut's exit code. Raises RuntimeError if there is no mutant."""
    files = sorted((folder / "mutants").rglob("*.meta"))
    found: Codes = {}
    for file in files:
        found |= json.loads(file.read_text())["exit_code_by_key"]
    if not found:
        raise RuntimeError("mutmut has made no mutants")
    return found


def _choose(codes: Codes, parts: Sequence[str], count: int, seed: int) -> list[str]:
    """The mutants of these parts, or a sample of all."""
    if parts:
        return [name for name in codes if name.startswith(tuple(parts))]
    return random.Random(seed).sample(sorted(codes), min(count, len(codes)))  # noqa: S311 - no secret


def _changed(diff: str) -> Iterator[str]:
    for line in diff.splitlines():
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---"):
            yield line


if __name__ == "__main__":
    sys.exit(main())
