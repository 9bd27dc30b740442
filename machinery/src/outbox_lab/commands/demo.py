"""outbox demo: the walkthrough."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import address, load
from outbox_lab.stack import interrupt

if TYPE_CHECKING:
    from outbox_lab.walkthrough.chain import Chain
    from outbox_lab.walkthrough.workload import Workload

TO_TRY = """\
Everything still runs, until Ctrl-C. In another terminal, in this folder:
  export OUTBOX_HOME=.outbox/demo PATH=$PWD/.venv/bin:$PATH
  outbox check                 the comparison you saw, at any time
  outbox status                the parts; kill -9 any of them, and `outbox up` restarts them
  outbox connect status        the effective exactly-once mode
  tail -f .outbox/demo/logs/sink-*.log"""
TO_TRY_CONTAINERS = """\
This command stays until Ctrl-C. The containers go on after it. In another terminal, in this folder:
  docker compose run --rm outbox check           the comparison you saw, at any time
  docker compose run --rm outbox connect status  the effective exactly-once mode
  docker compose kill connect                    or another; `docker compose up --detach` restarts it
  docker compose logs --follow sink"""


@click.command()
@click.option(
    "--once/--stay",
    default=False,
    help="Exit after the verdict, with status 0 only if every expectation held; or stay until Ctrl-C, the default.",
)
@click.option("--seed", type=int, help="Seed of the traffic. It is printed, so that a run can be repeated.")
@click.option(
    "--containers",
    "shared",
    type=click.Path(path_type=Path),
    help="Break the containers of docker-compose beside this one; the folder is shared with the one of Connect.",
)
@click.option(
    "--page",
    type=address,
    metavar="HOST:PORT",
    help="Where the player serves its page, if it has one; 127.0.0.1:8090. A free port takes the place of a taken one.",
)
def demo(*, once: bool, seed: int | None, shared: Path | None, page: tuple[str, int] | None) -> None:
    """Play the walkthrough: traffic without faults, three faults, and a verdict.

    It runs on a new, empty stack of its own in .outbox/demo. With --containers it runs on the chain of docker-compose,
    and compares with what that had at the beginning.
    """
    from outbox_lab.walkthrough import workload
    from outbox_lab.walkthrough.story import Story, load_player

    interrupt.once()
    chosen = load_player()
    chosen.page = page or chosen.page
    screen = chosen.screen
    seed = random.randrange(10**6) if seed is None else seed  # noqa: S311
    story, is_over = None, False
    try:
        planned = workload.load(seed)
        chain = chain_of_processes(planned, screen.progress) if shared is None else chain_of_containers(planned, shared)
        again = f"make demo SEED={seed}" if shared is None else f"docker compose run --build --rm demo --seed {seed}"
        screen.say(f"seed {seed} ({again} plays the same traffic)")
        story = Story(chain, planned, screen)
        chosen.play(story)
        is_over = True
        if screen.failed is None:
            screen.say("\nEvery expectation held.")
        if not once:
            screen.say("\n" + (TO_TRY if shared is None else TO_TRY_CONTAINERS))
            chosen.wait()
    except Failure as failure:
        if story is None:
            raise
        screen.failed = screen.failed or str(failure)
    except KeyboardInterrupt:
        screen.say("")
    finally:
        interrupt.never()  # half of it would keep running
        try:
            chosen.close()
        finally:
            if story is not None:
                story.tear_down()
    if screen.failed is not None:
        logs = f"in {_home() / 'logs'}" if shared is None else "shown by `docker compose logs`"
        click.echo(f"demo: expectation failed: {screen.failed}\ndemo: logs are {logs}", err=True)
        sys.exit(1)
    if not is_over:
        sys.exit(130)  # interrupted: there is no verdict


def _home() -> Path:
    """The folder of the walkthrough's own stack."""
    return project.current().home / "demo"


def chain_of_processes(planned: Workload, report: Callable[[str], None]) -> Chain:
    """A new, empty stack, and the sinks in one process. It starts as the first fault needs it: exactly-once is off."""
    from outbox.sink import discovery
    from outbox_lab.stack.stack import PATIENT_MS, Stack
    from outbox_lab.walkthrough.chain import Processes
    from outbox_lab.walkthrough.story import watched

    if _home().exists():
        report("deleting the data of the last walkthrough")
        Stack(load(_home(), environment=False)).reset()
    settings = load(_home(), environment=False, defaults=PATIENT_MS, exactly_once=False)
    return Processes(settings, watched(discovery.sinks(settings), planned))


def chain_of_containers(planned: Workload, shared: Path) -> Chain:
    """The containers beside this one."""
    from outbox.sink import discovery
    from outbox_lab.walkthrough.containers import Containers
    from outbox_lab.walkthrough.story import watched

    settings = load()
    return Containers(settings, watched(discovery.sinks(settings), planned), shared)
