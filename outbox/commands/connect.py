"""outbox connect apply | status | render | remove: the Debezium connector."""

from __future__ import annotations

import json

import click

from outbox import connect as connector
from outbox import settings as configuration
from outbox.errors import Failure


@click.group()
def connect() -> None:
    """The Debezium connector on Kafka Connect."""


@connect.command()
def apply() -> None:
    """Make topics and connector as connect/outbox.json says. Applying twice changes nothing."""
    settings = configuration.load()
    done = connector.apply(settings)
    click.echo(f"connector {settings.connector}: {done}, {connector.status(settings).mode}")


@connect.command()
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def status(as_json: bool) -> None:
    """The connector's and task's state, and the exactly-once mode really in force. Status 1 if it does not run."""
    settings = configuration.load()
    found = connector.status(settings)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        click.echo(f"connector   {settings.connector}: {found.connector}")
        click.echo(f"task        {', '.join(found.tasks) or 'none'}")
        click.echo(f"worker      exactly-once {'enabled' if found.worker_exactly_once else 'disabled'}")
        click.echo(f"wish        {found.connector_exactly_once or '-'}")
        click.echo(f"in force    {found.mode}")
    if found.error:
        raise Failure(f"connector {settings.connector} failed: {found.error}", "mend it, then `outbox connect apply`")
    if not found.is_running:
        raise Failure(f"connector {settings.connector} does not run", "`outbox connect apply`")


@connect.command()
def render() -> None:
    """Print the connector's configuration as JSON, for Terraform, Strimzi or curl. The password stays a reference."""
    click.echo(json.dumps(connector.render(configuration.load()), indent=2))


@connect.command()
@click.option("--forget", is_flag=True, help="Drop the slot and the stored offsets too: next comes a new snapshot.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(forget: bool, yes: bool) -> None:
    """Remove the connector. Without --forget its slot stays and holds the write-ahead log until `apply`."""
    settings = configuration.load()
    if not yes:
        click.confirm(
            f"Remove connector {settings.connector}{' with its slot and offsets' if forget else ''}?", abort=True
        )
    existed = connector.remove(settings, forget=forget)
    click.echo(f"connector {settings.connector}: {'removed' if existed else 'was not there'}")
