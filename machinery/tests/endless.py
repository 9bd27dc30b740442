"""A test that never ends, with a stack. Only `integration/test_stack.py` runs it, and interrupts it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from outbox_lab.stack.stack import Stack

STARTED = "ENDLESS_TEST_STARTED"  # names the file into which the test writes the home of its stack


def test_endless(postgres_stack: Stack) -> None:
    Path(os.environ[STARTED]).write_text(str(postgres_stack.home))
    threading.Event().wait()
