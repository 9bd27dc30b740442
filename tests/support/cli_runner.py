"""The `outbox` command, run as a user would: in a home of its own, with nothing else set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from outbox.base import project
from outbox.base.settings import PREFIX
from outbox.base.wait import timeout_scale
from tests.support.paths import ROOT

TIMEOUT_S = 300


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Our environment with the suite's project and no setting, then these."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name == project.VARIABLE
    }
    return {**inherited, "OUTBOX_HOME": str(home), **variables}


def outbox(*arguments: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a subcommand to its end."""
    return subprocess.run(
        [sys.executable, "-m", "outbox", *arguments],
        env=environment(home, **variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S * timeout_scale(),
    )
