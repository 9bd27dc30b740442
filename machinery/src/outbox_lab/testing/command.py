"""The `outbox` command, run as a user would: with the settings of a test and no other.

Each run is a process of its own. It is forked from one that has imported the machinery, because importing takes longer
than most commands do.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.base import project
from outbox.base.settings import PREFIX, Settings
from outbox.base.wait import timeout_scale
from outbox.cli import commands, main

TIMEOUT_S = 300
MODULES = {entry.target.partition(":")[0] for entry in commands().values()}
FORKS = multiprocessing.get_context("forkserver")
# Modules and libraries that commands import when they run.
LATE = (
    *("pyarrow.compute", "requests", "structlog", "outbox.audit.check", "outbox.audit.doctor"),
    *("outbox.audit.monitor", "outbox.migrations.migrate", "outbox.sink.running.supervisor"),
)
# With this module and its package: a process that had to import them to find `_run` would take six times as long.
FORKS.set_forkserver_preload([*MODULES, *LATE, __name__])


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Our environment with the suite's project and no setting, then these."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name == project.VARIABLE
    }
    return {**inherited, "OUTBOX_HOME": str(home), **variables}


def run(settings: Settings, *words: str, status: int = 0) -> str:
    """Output of a command, such as ``run(chain, "check", "--wait", "60")``. Its settings are these.

    Raises AssertionError with all output if it does not end with the status.
    """
    done = outbox(*words, home=settings.home, **settings.as_env())
    assert done.returncode == status, f"outbox {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def outbox(*arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a subcommand to its end."""
    words = ["outbox", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_run, args=(words, environment(home, **variables), files))
        process.start()
        try:
            process.join(TIMEOUT_S * timeout_scale())
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(words, TIMEOUT_S)
        finally:
            process.kill()
            process.join()
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _run(words: Sequence[str], variables: Mapping[str, str], files: Sequence[Path]) -> None:
    """Be the command: what its process does behind the imports."""
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    os.chdir(project.current().root)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [*words]
    try:
        main()
    finally:
        atexit._run_exitfuncs()
