"""The soak limits the files of servers, also of those that run as another user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from outbox.base.wait import wait_for
from outbox_lab.soak.faults.servers import UNLIMITED, limit_files
from outbox_lab.stack.process import Process


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
