"""The API keeps what its /openapi.json promises, whatever is sent: schemathesis makes the requests out of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from flask import Flask
from hypothesis import HealthCheck, assume, note, settings
from outbox import Settings, load_settings
from outbox_lab.testing import chosen_seed
from pydantic import ValidationError
from schemathesis import Case as AnyCase
from schemathesis.config import SchemathesisConfig
from schemathesis.openapi.loaders import from_wsgi

from service.app import create_app
from service.schemas import NewTransfer
from tests.ledger import Client, audit

Case = AnyCase[Any]
SEED = chosen_seed()
bounded = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)

# What the application says of itself needs no database. The requests go to another that has one.
promises = from_wsgi(
    "/openapi.json",
    create_app(load_settings(Path("nowhere"), environment=False, service_token="x")),
    # No text with NUL: the service refuses it in every field, which no schema says.
    config=SchemathesisConfig.from_dict({"seed": SEED, "generation": {"allow-x00": False}}),
)


class Served(NamedTuple):
    """The application with its database, and two accounts between which money can go."""

    app: Flask
    token: str
    bank: str
    user: str


@pytest.fixture(scope="module")
def served(shared_databases: Settings) -> Iterator[Served]:
    app = create_app(shared_databases)
    client = Client(app, shared_databases)
    token = shared_databases.service_token.get_secret_value()
    yield Served(app, token, client.open("system"), client.open("user"))
    assert audit(shared_databases) == {}


@promises.parametrize()
@bounded
def test_whatever_is_sent_the_answer_is_one_that_is_promised(case: Case, served: Served) -> None:
    check(case, served)


@promises.include(method="POST", path="/transfers").parametrize()
@bounded
def test_transfers_between_existing_accounts_are_answered(case: Case, served: Served) -> None:
    if isinstance(case.body, dict) and wrong(case.body) in ([], ["same_account"]):
        case.body.update(from_account=served.bank, to_account=served.user)
    check(case, served)


def wrong(body: object) -> list[str]:
    """Errors that the service finds in the body of a transfer."""
    try:
        NewTransfer.model_validate(body)
    except ValidationError as error:
        return [one["type"] for one in error.errors()]
    return []


def check(case: Case, served: Served) -> None:
    """Send the request and hold the answer against everything that schemathesis can check."""
    if isinstance(case.body, dict):
        # What no schema can say: an integer is not written as 1.0, and the two accounts differ.
        assume(not isinstance(case.body.get("amount"), float))
        assume(wrong(case.body) != ["same_account"])
    note(f"seed: {SEED}")
    case.call_and_validate(app=served.app, headers={"Authorization": f"Bearer {served.token}"})
