"""What `outbox serve` does before gunicorn takes its place."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

METRICS_FOLDER = "from outbox.commands import serve; print(serve._metrics_folder())"


def metrics_folder(temporary: Path) -> Path:
    """The folder that a service takes for its metrics, in a process of its own: one that hangs is ended."""
    done = subprocess.run(
        [sys.executable, "-c", METRICS_FOLDER],
        env={**os.environ, "TMPDIR": str(temporary)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return Path(done.stdout.strip())


def test_what_others_put_beside_the_folders_of_metrics_stays_and_stops_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "outbox-metrics-fifo")
    (tmp_path / "outbox-metrics-file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "outbox-metrics-link").symlink_to("other")
    before = {path.name for path in tmp_path.iterdir()}
    made = metrics_folder(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*before, made.name}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root could delete a folder of another user")
def test_folder_of_another_user_stays(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="outbox-metrics-", dir=tmp_path) as foreign:
        os.chown(foreign, 65534, 65534)
        metrics_folder(tmp_path)
        assert Path(foreign).exists()
