"""outbox token: what clients of the service send."""

from __future__ import annotations

import click

from outbox.base.errors import Failure
from outbox.base.settings import load


@click.command()
def token() -> None:
    """Print the bearer token that clients of the service send, for example to a variable:

    \b
    token=$(outbox token)
    curl --header "Authorization: Bearer $token" …
    """
    found = load().service_token.get_secret_value()
    if not found:
        raise Failure(
            "there is no OUTBOX_SERVICE_TOKEN",
            "`outbox up` generates one, or set your own; with docker-compose only the service has it:"
            " docker compose exec serve python -m outbox token",
            code="service-token-missing",
        )
    click.echo(found)
