"""outbox sink: run the streaming sinks."""

from __future__ import annotations

import click

from outbox.base import log, project
from outbox.base import settings as configuration
from outbox.sink import spec
from outbox.sink.strategy import Strategy


class SinkCommand(click.Command):
    """A command whose help compares the strategies."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        known = spec.sinks(configuration.load(environment=False))  # so that a wrong setting does not hide the help
        with formatter.section("Strategies"):
            formatter.write_dl([(name, _described(one.strategy)) for name, one in known.items()])


def _described(one: Strategy) -> str:
    return f"{one.idea}. Survives {one.survives}. Costs {one.costs}. Choose it {one.choose}."


@click.command(cls=SinkCommand)
@click.option(
    "--strategy",
    "names",
    multiple=True,
    show_default="those of [tool.outbox]",
    metavar="NAME",
    help="How duplicates are recognised. Several strategies make as many sinks, side by side.",
)
@click.option(
    "--until-caught-up", is_flag=True, help="End when everything that the topic has committed now is applied."
)
@click.option("--fail-fast", is_flag=True, help="Stop all sinks when one fails; without it the others continue.")
def sink(names: tuple[str, ...], until_caught_up: bool, fail_fast: bool) -> None:
    """Apply the topic's events to the sink database, until stopped by SIGTERM or Ctrl-C."""
    from outbox.sink.spark import stream

    settings = configuration.load()
    log.configure(settings)
    specs = spec.choose(settings, names or project.current().strategies)
    stream.run(settings, specs, until_caught_up=until_caught_up, fail_fast=fail_fast)
