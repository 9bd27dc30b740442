"""`outbox` commands that an operator runs beside everything, with the code of their failure."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from outbox.base.wait import timeout_scale
from outbox.stack.command import Command

TIMEOUT_S = 600
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

    It does not see a Ctrl-C of the terminal, which ends the faults of the soak and no command.
    """
    done = subprocess.run(
        [sys.executable, "-c", CODED, *words],
        env={**os.environ, **command.env()},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * timeout_scale(),
        start_new_session=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)
