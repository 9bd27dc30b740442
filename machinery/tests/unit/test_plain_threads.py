"""The threads in which a plain sink applies and handlers are called."""

from __future__ import annotations

import subprocess
import sys

from outbox.base import wait

PROGRAM = f"""
import time
from {wait.__name__} import in_thread

in_thread("apply", time.sleep, 3600)
try:
    in_thread("apply", exit, 3).result()
except SystemExit as error:
    print("seen", error)
"""


def test_a_call_that_never_returns_does_not_keep_the_process_and_any_exception_is_seen() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "seen 3\n"), done.stderr
