"""A disk of a run can be full, and only the run sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from outbox.base.wait import wait_for
from outbox_lab.soak import disk
from outbox_lab.soak.disk import Disk
from outbox_lab.soak.faults.servers import FULL, UNLIMITED, limit_files
from outbox_lab.stack.process import Process

# In a process of its own: nobody leaves a namespace. It writes until it is refused, gets room, and writes again.
FILLED = """
import os, sys
from pathlib import Path
from outbox_lab.soak.disk import Disk, enter_namespace, is_entered

assert not is_entered()
enter_namespace()
assert is_entered()
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
    if why := disk.why_impossible():
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
    assert not disk.is_entered()
    with pytest.raises(OSError, match="namespace"):
        Disk(tmp_path).mount()


def test_the_reason_is_that_of_the_process_that_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "TRY", "raise PermissionError(1, 'unshare: Operation not permitted')")
    assert "Operation not permitted" in disk.why_impossible()


def test_the_process_that_enters_has_one_thread() -> None:
    count = "import os; from outbox_lab.soak import disk; print(len(os.listdir('/proc/self/task')))"
    if not Path("/proc/self/task").exists():
        pytest.skip("only Linux shows the threads of a process there")
    assert subprocess.check_output([sys.executable, "-c", count], text=True).strip() == "1"


class Sleeper(Process):
    """A process that does nothing, as root one of another user, as Postgres is."""

    def argv(self) -> Sequence[str | Path]:
        drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
        return [*drop, "sleep", "60"]


def max_file_size(pid: int) -> list[str]:
    """The limit that a process has, and the one that it may set."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (found,) = [line for line in lines if line.startswith("Max file size")]
    return found.split()[3:5]


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="only Linux limits the files of a process that runs")
def test_the_files_of_a_process_of_another_user_are_limited(tmp_path: Path) -> None:
    sleeper = Sleeper("sleeper", tmp_path)
    sleeper.spawn()
    try:
        wait_for("it to sleep", lambda: sleeper.processes()[0].name() == "sleep", timeout_s=10)
        [process] = sleeper.processes()
        assert limit_files(sleeper, "1024:unlimited") == 1
        assert max_file_size(process.pid) == ["1024", "unlimited"]
        assert limit_files(sleeper, UNLIMITED) == 1
        assert max_file_size(process.pid) == ["unlimited", "unlimited"]
    finally:
        sleeper.kill()
