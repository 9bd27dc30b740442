"""python -m demo: the walkthrough. `make demo` calls it."""

from __future__ import annotations

import random
import signal
import sys

import click
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import load
from outbox.stack.stack import Stack

from demo.screen import Screen
from demo.story import Story

HOME = project.current().root / ".outbox" / "demo"
TO_TRY = """\
Everything still runs, until Ctrl-C. In another terminal, in this folder:
  export OUTBOX_HOME=.outbox/demo PATH=$PWD/.venv/bin:$PATH
  outbox check                 the comparison you saw, at any time
  outbox status                the parts; kill -9 any of them, and `outbox up` restarts them
  outbox connect status        the effective exactly-once mode
  tail -f .outbox/demo/logs/sink-*.log"""


@click.command()
@click.option("--once", is_flag=True, help="Exit after the verdict, with status 0 only if every expectation held.")
@click.option("--seed", type=int, help="Seed of the traffic. It is printed, so that a run can be repeated.")
def main(once: bool, seed: int | None) -> None:
    """Play the walkthrough on a new, empty stack of its own."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C does
    screen = Screen()
    seed = random.randrange(10**6) if seed is None else seed
    story = None
    try:
        settings = load(HOME, environment=False)
        if HOME.exists():
            screen.progress("deleting the data of the last walkthrough")
            Stack(settings).reset()
        screen.say(f"seed {seed} (make demo SEED={seed} plays the same traffic)")
        story = Story(load(HOME, environment=False), screen, seed)
        story.play()
        if screen.failed is None:
            screen.say("\nEvery expectation held.")
        if not once:
            screen.say("\n" + TO_TRY)
            signal.pause()
    except Failure as failure:
        screen.failed = screen.failed or str(failure)
    except KeyboardInterrupt:
        screen.say("")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it running
        if story is not None:
            story.tear_down()
    if screen.failed is not None:
        click.echo(f"demo: expectation failed: {screen.failed}\ndemo: logs are in {HOME / 'logs'}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
