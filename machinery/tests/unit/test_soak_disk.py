"""A disk of a run can be full, and only the run sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from outbox.base.wait import wait_for
from outbox.soak import namespace
from outbox.soak.disk import Disk
from outbox.soak.faults.disks import FULL, DiskFailing
from outbox.stack.process import Process

# In a process of its own: nobody leaves a namespace. It writes until it is refused, gets room, and writes again.
FILLED = """
import os, sys
from pathlib import Path
from outbox.soak import namespace
from outbox.soak.disk import Disk

assert not namespace.is_entered()
namespace.enter()
assert namespace.is_entered()
disk = Disk(Path(sys.argv[1]))
disk.mount()
file = Path(sys.argv[1], "file")
file.write_bytes(bytes(1 << 20))
disk.fill()
assert disk.used_bytes == 1 << 20, disk.used_bytes
try:
    Path(sys.argv[1], "more").write_bytes(b"x")
except OSError as error:
    print(error)
file.unlink()
Path(sys.argv[1], "more").write_bytes(b"x")
disk.fill()
disk.free()
file.write_bytes(bytes(2 << 20))
print(os.geteuid(), sorted(os.listdir(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def can_mount() -> None:
    """Skips where neither root nor a user may mount in a namespace, as in most containers."""
    if why := namespace.why_impossible():
        pytest.skip(why)


@pytest.mark.usefixtures("can_mount")
def test_a_full_disk_refuses_and_only_the_run_sees_it(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILLED, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    refused, seen = done.stdout.splitlines()
    assert FULL.search(refused)
    assert seen == f"{os.geteuid()} ['file', 'more']", "it stays who it is"
    assert list(tmp_path.iterdir()) == []


def test_outside_a_namespace_nothing_is_mounted(tmp_path: Path) -> None:
    assert not namespace.is_entered()
    with pytest.raises(OSError, match="namespace"):
        Disk(tmp_path).mount()


def test_the_reason_is_that_of_the_process_that_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "TRY", "raise PermissionError(1, 'unshare: Operation not permitted')")
    assert "Operation not permitted" in namespace.why_impossible()


def test_the_process_that_enters_has_one_thread() -> None:
    count = "import os; from outbox.soak import namespace; print(len(os.listdir('/proc/self/task')))"
    if not Path("/proc/self/task").exists():
        pytest.skip("only Linux shows the threads of a process there")
    assert subprocess.check_output([sys.executable, "-c", count], text=True).strip() == "1"


class Sleeper(Process):
    """A process that runs, and whose files can be limited."""

    def argv(self) -> Sequence[str | Path]:
        return ["sleep", "600"]


class Chain:
    """One whose parts are all this process."""

    def __init__(self, process: Process) -> None:
        self.stack = self
        self._process = process

    def part(self, name: str) -> Process:
        del name
        return self._process


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[Process]:
    """It runs."""
    process = Sleeper("postgres", tmp_path)
    process.spawn()
    wait_for("the process", process.is_running, timeout_s=60)
    yield process
    process.kill()


@pytest.mark.skipif(not psutil.LINUX, reason="only Linux limits the files of a process that runs")
def test_a_disk_fails_only_where_we_may_limit_the_files_of_others(
    sleeper: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    testbed: Any = Chain(sleeper)
    [running] = sleeper.processes()
    before = running.rlimit(psutil.RLIMIT_FSIZE)
    assert DiskFailing("postgres").is_possible(testbed)
    assert running.rlimit(psutil.RLIMIT_FSIZE) == before, "it has only tried"

    def refuse(process: psutil.Process, resource: int, limits: object = None) -> tuple[int, int]:
        if limits is not None:
            raise psutil.AccessDenied(process.pid)
        return before

    monkeypatch.setattr(psutil.Process, "rlimit", refuse)
    assert not DiskFailing("postgres").is_possible(testbed)
