"""outbox connect apply | status | render | remove: the Debezium connectors."""

from __future__ import annotations

import json
from typing import Any

import click

from outbox.base.settings import load
from outbox.relay import connectors, managed

kind_argument = click.argument(
    "kind",
    metavar=f"[{'|'.join(connectors.kinds())}]",
    type=click.Choice(connectors.kinds()),
    default=connectors.OUTBOX,
)


@click.group()
def connect() -> None:
    """The Debezium connectors on Kafka Connect. Each is a file of connect/; the default is `outbox`."""


@connect.command()
@kind_argument
def apply(kind: str) -> None:
    """Create the topics that are missing, and create or update the connector. Existing topics are not changed."""
    from outbox.relay import lifecycle  # with clients of Kafka and Postgres, which `render` does not need

    settings = load()
    connector = connectors.load(settings, kind)
    done = lifecycle.apply(settings, connector, lambda: click.echo(lifecycle.released(connector)))
    click.echo(f"connector {connector.name}: {done}, {lifecycle.status(settings, connector).mode}")


@connect.command()
@kind_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON for a script.")
def status(kind: str, as_json: bool) -> None:
    """Show the states of connector and task, and the effective exactly-once mode. Status 1 if it does not run."""
    from outbox.relay import lifecycle

    settings = load()
    connector = connectors.load(settings, kind)
    found = lifecycle.status(settings, connector)
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        click.echo(f"connector   {connector.name}: {found.connector}")
        click.echo(f"task        {', '.join(found.tasks) or 'none'}")
        click.echo(f"worker      exactly-once {'enabled' if found.worker_exactly_once else 'disabled'}")
        click.echo(f"requested   {found.connector_exactly_once or '-'}")
        click.echo(f"effective   {found.mode}")
    if failure := lifecycle.failure_of(connector, found):
        raise failure


@connect.command()
@kind_argument
@click.option(
    "--for",
    "service",
    type=click.Choice(["msk-connect", "confluent-cloud"]),
    help="As a managed service takes it: the two requests of MSK Connect's API, or Confluent Cloud's connector.",
)
def render(kind: str, service: str | None) -> None:
    """Print the connector's configuration as JSON, for Terraform, Strimzi or curl. The password stays a reference."""
    settings = load()
    connector = connectors.load(settings, kind)
    rendered: Any = connector.config
    if service == "msk-connect":
        rendered = managed.msk_connect(settings, connector)
    elif service == "confluent-cloud":
        rendered, left_out = managed.confluent_cloud(settings, connector)
        click.echo(f"left out, see docs/bring-your-own.md: {', '.join(left_out)}", err=True)
    click.echo(json.dumps(rendered, indent=2))


@connect.command()
@kind_argument
@click.option("--drop-slot", is_flag=True, help="Drop slot and stored offsets too; the next `apply` takes a snapshot.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def remove(kind: str, drop_slot: bool, yes: bool) -> None:
    """Remove the connector. Without --drop-slot its slot stays and retains the write-ahead log until `apply`."""
    from outbox.relay import lifecycle

    settings = load()
    connector = connectors.load(settings, kind)
    if not yes:
        extent = " with its slot and offsets" if drop_slot else ""
        click.confirm(f"Remove connector {connector.name}{extent}?", abort=True)
    existed = lifecycle.remove(settings, connector, drop_slot=drop_slot)
    click.echo(f"connector {connector.name}: {'removed' if existed else 'was not there'}")
