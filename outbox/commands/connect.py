"""outbox connect apply | status | render | remove: the Debezium connector."""

from __future__ import annotations

import json

import click

from outbox.base import settings as configuration
from outbox.base.errors import Failure
from outbox.relay import connect as connecting
from outbox.relay import connectors

which = click.argument(
    "kind",
    metavar=f"[{'|'.join(connectors.kinds())}]",
    type=click.Choice(connectors.kinds()),
    default=connectors.OUTBOX,
)


@click.group()
def connect() -> None:
    """The Debezium connectors on Kafka Connect, each a file of connect/: `outbox`, unless another is named."""


@connect.command()
@which
def apply(kind: str) -> None:
    """Make topics and connector as the file says. Applying twice changes nothing."""
    settings = configuration.load()
    connector = connectors.load(settings, kind)
    done = connecting.apply(settings, connector)
    click.echo(f"connector {connector.name}: {done}, {connecting.status(settings, connector).mode}")


@connect.command()
@which
@click.option("--json", "as_json", is_flag=True, help="For a script.")
def status(kind: str, as_json: bool) -> None:
    """The connector's and task's state, and the exactly-once mode really in force. Status 1 if it does not run."""
    settings = configuration.load()
    connector = connectors.load(settings, kind)
    found = connecting.status(settings, connector)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        click.echo(f"connector   {connector.name}: {found.connector}")
        click.echo(f"task        {', '.join(found.tasks) or 'none'}")
        click.echo(f"worker      exactly-once {'enabled' if found.worker_exactly_once else 'disabled'}")
        click.echo(f"wish        {found.connector_exactly_once or '-'}")
        click.echo(f"in force    {found.mode}")
    if found.error:
        raise Failure(
            f"connector {connector.name} failed: {found.error}", f"mend it, then `{connector.command('apply')}`"
        )
    if not found.is_running:
        raise Failure(f"connector {connector.name} does not run", f"`{connector.command('apply')}`")


@connect.command()
@which
def render(kind: str) -> None:
    """Print the connector's configuration as JSON, for Terraform, Strimzi or curl. The password stays a reference."""
    click.echo(json.dumps(connectors.load(configuration.load(), kind).config, indent=2))


@connect.command()
@which
@click.option("--forget", is_flag=True, help="Drop the slot and the stored offsets too: next comes a new snapshot.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove(kind: str, forget: bool, yes: bool) -> None:
    """Remove the connector. Without --forget its slot stays and holds the write-ahead log until `apply`."""
    settings = configuration.load()
    connector = connectors.load(settings, kind)
    if not yes:
        click.confirm(f"Remove connector {connector.name}{' with its slot and offsets' if forget else ''}?", abort=True)
    existed = connecting.remove(settings, connector, forget=forget)
    click.echo(f"connector {connector.name}: {'removed' if existed else 'was not there'}")
