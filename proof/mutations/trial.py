"""Run tests on a copy of a repository, with a mutation or without any, and read what became of each.

A mutation is *caught* only if a test has failed in its own code, as an assertion does. An error while a fixture was set
up does not count: it says that the test could not look. Nor does code that cannot be imported, or a test that did not
end: any test would notice that.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, Self
from xml.etree import ElementTree as ET

from outbox_lab.testing.homes import Homes

from proof.mutations import shared_stack
from proof.mutations.mutation import ROOT, Mutation

TIMEOUT_S = 1200
END_TIMEOUT_S = 60  # for the servers of a test that is ended
TAIL = 3000  # characters of the output of a run that has no result
REASON_MAX = 160  # characters
NOT_NEEDED = ("-p", "no:cacheprovider", "-p", "no:schemathesis")  # plugins; to import them takes half of a short run
# A stack that runs already would not show what is changed in these folders.
OF_A_STACK = ("machinery/src/outbox/migrations/", "machinery/src/outbox_lab/stack/", "machinery/src/outbox/base/")
# Reasons that say nothing about the promise of a mutation: the code is broken, or pytest-timeout has ended the test.
NO_EVIDENCE = re.compile(r"(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError|Failed: Timeout)\b")

Fate = Literal["passed", "failed", "error", "skipped"]
Verdict = Literal["caught", "not caught", "no verdict"]


class Ran(NamedTuple):
    """A test that has run: what became of it, and for a failure the first line of the reason."""

    fate: Fate
    reason: str = ""


class Trial(NamedTuple):
    """The result of a mutation's tests; ``why`` names the test that has failed, or why there is no verdict."""

    verdict: Verdict
    why: str
    seconds: float


class Workshop:
    """A copy of a repository, in which one trial after another runs. Ended by ``with``.

    Trials of a suite share a stack, which is most of their time otherwise. Each test has databases and topics of its
    own there.
    """

    def __init__(self, root: Path) -> None:
        with ExitStack() as opened:
            self._folder = opened.enter_context(copy_of(root))
            self._homes = Homes(self._folder.parent / "homes")
            opened.callback(self._homes.close, keep_logs=False)
            self._stacks = dict[str, Path]()  # by suite: each has roles and passwords of its own
            self._opened = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def attempt(self, mutation: Mutation) -> Trial:
        """Run the tests of a mutation with it, until one fails."""
        began = time.monotonic()
        with mutation.applied(self._folder):
            ran = self._run(mutation.suite, mutation.tests, "-x", is_shared=not mutation.file.startswith(OF_A_STACK))
        return Trial(*verdict(ran), time.monotonic() - began)

    def baseline(self, suite: str, tests: Sequence[str]) -> dict[str, str]:
        """Run tests without any mutation. Returns those that do not pass, and why: they could not show anything."""
        ran = self._run(suite, tests, is_shared=True)
        return {test: why for test in tests if (why := _not_green(test, ran))}

    def _run(self, suite: str, tests: Sequence[str], *options: str, is_shared: bool) -> dict[str, Ran]:
        """By node id, what became of the tests. Raises RuntimeError if pytest did not work, or takes too long."""
        results = self._folder.parent / "results.xml"
        results.unlink(missing_ok=True)
        path = os.pathsep.join([str(self._folder / "machinery" / "src"), os.environ.get("PYTHONPATH", ""), str(ROOT)])
        if suite not in self._stacks:
            self._stacks[suite] = self._homes.new("stack")
        plugins = ["-p", shared_stack.__name__] if is_shared else []
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *NOT_NEEDED, *plugins, f"--junitxml={results}", *options, *tests],
            cwd=self._folder / suite,
            env={**os.environ, "PYTHONPATH": path, shared_stack.VARIABLE: str(self._stacks[suite])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except BaseException as error:
            output = _end(process)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RuntimeError(f"the tests did not end in {TIMEOUT_S} s\n{output[-TAIL:]}") from None
            raise
        if process.returncode not in (0, 1):  # https://docs.pytest.org/en/stable/reference/exit-codes.html
            raise RuntimeError(f"pytest ended with {process.returncode}\n{output[-TAIL:]}")
        return dict(_results(results, self._folder.parent))


def verdict(ran: Mapping[str, Ran]) -> tuple[Verdict, str]:
    """The verdict on a mutation, and the test that decided it."""
    failed = [f"{name}: {one.reason}" for name, one in ran.items() if _has_noticed(one)]
    others = [
        f"{name}: {one.fate}: {one.reason}"
        for name, one in ran.items()
        if one.fate != "passed" and not _has_noticed(one)
    ]
    if failed:
        return "caught", failed[0]
    if others or not ran:
        return "no verdict", others[0] if others else "no test has run"
    return "not caught", f"{len(ran)} passed"


def _has_noticed(ran: Ran) -> bool:
    return ran.fate == "failed" and not NO_EVIDENCE.match(ran.reason)


def _not_green(test: str, ran: Mapping[str, Ran]) -> str:
    """Why a test shows nothing; empty if it has passed, with all its parameters."""
    own = [one for name, one in ran.items() if name == test or name.startswith(f"{test}[")]
    return next((f"{one.fate}: {one.reason}" for one in own if one.fate != "passed"), "" if own else "did not run")


def _end(process: subprocess.Popen[str]) -> str:
    """End pytest as a person would, so that it stops its servers; returns its output."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=END_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def _results(file: Path, folder: Path) -> Iterator[tuple[str, Ran]]:
    """Of a file that pytest has written: node ids, and what became of the tests. No reason names a folder of this
    machine, such as ``folder``, in which the tests have run.
    """
    own = [re.escape(f"{one}/") for one in (folder, ROOT, Path.home(), tempfile.gettempdir())]
    for case in ET.parse(file).iter("testcase"):  # noqa: S314 - our own pytest has written it
        module, *classes = case.get("classname", "").split(".Test")
        name = "::".join([f"{module.replace('.', '/')}.py", *(f"Test{one}" for one in classes), case.get("name", "")])
        for tag, fate in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            if (found := case.find(tag)) is not None:
                [line] = found.get("message", "").strip().splitlines()[:1] or [""]
                yield name, Ran(fate, re.sub("|".join(own), "…/", line)[:REASON_MAX])  # type: ignore[arg-type]
                break
        else:
            yield name, Ran("passed")


@contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """A copy of the files that git knows or would take."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutation ") as folder:
        copy = Path(folder) / "repository"
        for name in filter(None, listed.stdout.split("\0")):
            source, target = root / name, copy / name
            if source.is_file() or source.is_symlink():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        subprocess.run(["git", "init", "-q", copy], check=True)  # tests of the template ask git for its files
        yield copy
        if sys.pycache_prefix:
            shutil.rmtree(Path(sys.pycache_prefix, *copy.parent.parts[1:]), ignore_errors=True)
