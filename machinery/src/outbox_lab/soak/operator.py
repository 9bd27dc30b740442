"""`outbox` commands that an operator runs beside everything, with the code of their failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from outbox.base.wait import wait_for
from outbox_lab.stack import interrupt
from outbox_lab.stack.command import Command

TIMEOUT_S = 600
LOOK_S = 1.0
PREFIX = "failure-code: "
# As `python -m outbox`, and the last line on stderr is the code. A traceback has no such line.
CODED = f"""
import sys
from outbox import cli
from outbox.base.errors import Failure
try:
    cli.outbox.main(standalone_mode=False)
except Failure as failure:
    sys.exit(f"outbox: {{failure}}\\n{PREFIX}{{failure.code}}")
"""


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    status: int
    output: str
    errors: str

    @property
    def code(self) -> str:
        """The code of its failure. Empty if it has succeeded, or has ended otherwise, as with a traceback."""
        last = self.errors.strip().rpartition("\n")[2]
        return last.removeprefix(PREFIX) if self.status and last.startswith(PREFIX) else ""

    @property
    def end(self) -> str:
        """The last line that it printed."""
        lines = [line for line in (self.output + self.errors).splitlines() if not line.startswith(PREFIX)]
        return lines[-1].strip()[:300] if lines else ""


def run(command: Command, words: Sequence[str]) -> Done:
    """Run the command of these words to its end, in the environment of the command.

    The first Ctrl-C of a terminal, which ends the faults, does not reach it. Raises Failure once a signal has ended the
    run, and then the command is killed.
    """
    with subprocess.Popen(
        [sys.executable, "-c", CODED, *words],
        env={**os.environ, **command.env()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:

        def printed() -> tuple[str, str] | None:
            with suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=LOOK_S)
            return None

        what = f"`outbox {' '.join(words)}` to end"
        try:
            output, errors = wait_for(what, printed, timeout_s=TIMEOUT_S, poll_s=0, needs=interrupt.require_none)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return Done(process.returncode, output, errors)
