"""Record the class archives of `outbox.jvm.archive`: run the whole chain once, in a home folder of its own.

python -m outbox_lab.stack.archives     record those that are missing; takes about half a minute
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.base.terminal import Progress
from outbox.base.wait import SCALE_VARIABLE, timeout_scale, wait_for
from outbox.jvm import archive
from outbox.jvm.jars import jars, spark_jars
from outbox.sink import discovery
from outbox_lab.stack.command import Command
from outbox_lab.stack.stack import Deployment, Stack

MORE_TIME = 5  # without an archive, and with one to write: on a busy machine a start takes minutes


def class_paths() -> dict[str, Sequence[Path]]:
    """The jars of each JVM that has an archive."""
    return {"kafka": jars("kafka"), "connect": jars("kafka"), "spark": [*jars("spark"), *spark_jars()]}


def record(stack: Stack, report: Progress) -> list[str]:
    """Record every archive, and return the names of those that were not written. Then the home stays, with its logs."""
    stack.down()  # what an interrupted recording left
    # This process starts nothing else.
    os.environ |= {archive.VARIABLE: "record", SCALE_VARIABLE: str(MORE_TIME * timeout_scale())}
    try:
        _run(stack, report)
    finally:
        stack.down()
    failed = [name for name, files in class_paths().items() if not archive.install(name, files)]
    if not failed:
        stack.reset()
    return failed


def _run(stack: Stack, report: Progress) -> None:
    stack.up(report=report)
    Deployment(stack).update(report)
    settings = stack.settings
    name = next(name for name, sink in discovery.sinks(settings).items() if sink.job.events)
    report(f"sink {name}: runs until it has caught up")
    sink = Command("sink", settings, ["sink", name, "--until-caught-up"])
    sink.spawn()
    stack.part("connect").stop()  # it writes its archive while the sink, which needs only the broker, makes its own
    wait_for("the sink and its JVM to end", lambda: not sink.processes(), timeout_s=60, poll_s=0.2)
    stack.part("kafka").stop()


def main() -> None:
    """Record the archives unless all of them are there."""
    if all(archive.path(name, files).exists() for name, files in class_paths().items()):
        return

    def say(line: str) -> None:
        print(line, file=sys.stderr)  # noqa: T201

    say("recording class archives, once: the JVMs of later starts need half the time")
    # Below the project's own home, so that `outbox down` finds it too.
    stack = Stack(load(project.current().home / "archives", environment=False), any_ports=True)
    failed = record(stack, report=lambda line: say(f"  {line}"))
    if failed:
        say(f"not recorded: {', '.join(failed)}; all works without them; see {stack.home / 'logs'}")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
