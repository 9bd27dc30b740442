"""outbox soak: break every hop at random, and judge what that has left."""

from __future__ import annotations

import fnmatch
import random
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outbox.base import project, settings
from outbox.base.errors import Failure
from outbox.base.wait import timeout_scale
from outbox_lab.soak.faults import FAULTS
from outbox_lab.soak.nemesis import Fault
from outbox_lab.soak.record import Folder, Plan
from outbox_lab.stack import interrupt

if TYPE_CHECKING:
    from outbox_lab.soak.judge import Verdict

UNITS_S = {"s": 1, "m": 60, "h": 3600}


class Duration(click.ParamType[float]):
    """A number of seconds, minutes or hours: 90s, 8m, 6h."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+)([smh])", str(value))
        if found is None:
            self.fail(f"{value} is not a duration such as 90s, 8m or 6h", param, ctx)
        return float(found[1]) * UNITS_S[found[2]]


@click.command()
@click.option("--seed", type=int, help="Seed of requests and faults. It is printed, so that a run can be repeated.")
@click.option("--duration", type=Duration(), default="5m", show_default=True, help="How long faults are injected.")
@click.option("--faults", default="*", help="Only these, separated by commas: names, or patterns such as sinks-*.")
@click.option("--rate", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="Requests per second.")
@click.option(
    "--pause", type=click.FloatRange(min=0), default=5.0, show_default=True, help="Seconds between faults, on average."
)
@click.option("--at-least-once", is_flag=True, help="With Connect's exactly-once off.")
@click.option("--judge", "judged", type=click.Path(path_type=Path), help="Only judge the files of a run again.")
@click.option("--list", "is_list", is_flag=True, help="List the faults.")
def soak(
    *,
    seed: int | None,
    duration: float,
    faults: str,
    rate: float,
    pause: float,
    at_least_once: bool,
    judged: Path | None,
    is_list: bool,
) -> None:
    """Run clients and faults against a stack of its own, and judge the result.

    Status 0 if every promise held and every fault that began happened, 1 if not, 3 if nobody can say. The files
    of the run stay in .outbox/soak.
    """
    if is_list:
        width = max(map(len, FAULTS))
        for name, fault in FAULTS.items():
            click.echo(f"{name:{width}}  {fault.summary}")
        return
    from outbox_lab.soak import domain, run

    if judged is not None:
        folder = Folder(judged)
        _tell(run.judge_again(domain.load(folder.plan.seed), folder), folder)
    chosen = _chosen(faults)
    seed = random.randrange(10**6) if seed is None else seed  # noqa: S311
    loaded = domain.load(seed)
    path = project.current().home / "soak" / f"{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    path.mkdir(parents=True)
    folder = Folder(path)
    given = settings.load(path / "stack", environment=False, exactly_once=not at_least_once)
    plan = Plan(
        seed=seed,
        duration_s=duration,
        rate=rate,
        pause_s=pause,
        exactly_once=not at_least_once,
        faults=list(chosen),
        timeout_scale=timeout_scale(),
    )
    click.echo(f"seed {seed}; files in {path}")
    interrupt.once()
    _tell(run.soak(given, loaded, plan, chosen, folder, click.echo), folder)


def _chosen(patterns: str) -> dict[str, Fault]:
    """The faults that a pattern fits. Raises Failure for a pattern that fits none."""
    chosen: dict[str, Fault] = {}
    for pattern in patterns.split(","):
        fitting = fnmatch.filter(FAULTS, pattern.strip())
        if not fitting:
            raise Failure(f"no fault is called {pattern}", "`outbox soak --list` shows all", code="fault-unknown")
        chosen |= {name: FAULTS[name] for name in fitting}
    return chosen


def _tell(verdict: Verdict, folder: Folder) -> None:
    for finding in verdict.findings:
        click.echo(f"{finding}")
    click.echo(
        f"{verdict.result}: {verdict.operations} operations ({verdict.unknown_operations} with an unknown outcome), "
        f"{verdict.events} events, {verdict.repeats} repeated on the topics, {verdict.faults} faults"
        + (f"; {verdict.why_unknown}" if verdict.why_unknown else "")
    )
    if verdict.selected:
        happened = verdict.selected - len(verdict.not_happened)
        missing = f"; not {', '.join(verdict.not_happened)}" if verdict.not_happened else ""
        click.echo(f"{happened} of {verdict.selected} selected faults happened{missing}")
    click.echo(f"`outbox soak --judge {folder.path}` judges it again")
    sys.exit({"valid": 0, "invalid": 1, "unknown": 3}[verdict.result])
