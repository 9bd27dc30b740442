"""outbox sink: run the streaming sinks."""

from __future__ import annotations

import click

from outbox.base import log
from outbox.base import settings as configuration
from outbox.sink import job
from outbox.sink.strategy import Strategy


class SinkCommand(click.Command):
    """A command whose help tells the strategies apart."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        known = job.sinks(configuration.load(environment=False))  # help is there also beside a wrong setting
        with formatter.section("Strategies"):
            formatter.write_dl([(name, _told(one.strategy)) for name, one in known.items()])


def _told(one: Strategy) -> str:
    return f"{one.idea}. Survives {one.survives}. Costs {one.costs}. Choose it {one.choose}."


@click.command(cls=SinkCommand)
@click.option(
    "--strategy",
    "names",
    multiple=True,
    default=["dedup"],
    show_default=True,
    metavar="NAME",
    help="How a duplicate is told; several make as many sinks, side by side.",
)
@click.option("--until-caught-up", is_flag=True, help="End when all that the topic has committed now is applied.")
def sink(names: tuple[str, ...], until_caught_up: bool) -> None:
    """Apply the topic's events to the balances database, until stopped by SIGTERM or Ctrl-C."""
    from outbox.sink.spark import stream

    settings = configuration.load()
    log.configure(settings)
    stream.run(settings, job.choose(settings, names), until_caught_up)
