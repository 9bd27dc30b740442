"""The HTTP API: a schema validates the input of each route; the route does one thing in one transaction."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from prometheus_client import Counter
from sqlalchemy import Engine, Row, insert, select
from werkzeug.exceptions import NotFound

from outbox.base import trace
from outbox.base.settings import Settings
from outbox.http import problems
from outbox.http.auth import SECURITY
from outbox.http.idempotency import Key
from outbox.http.problems import READING, WRITING, responses
from service import tables
from service.schemas import (
    Account,
    AccountPath,
    NewAccount,
    NewTransfer,
    Transfer,
    TransferHeaders,
    TransferPath,
)
from service.transfer import transfer

JSON = "application/json"
REFUSING = responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


def ledger_api(engine: Engine, transfers: Counter, settings: Settings) -> APIBlueprint:
    """The routes of the ledger."""
    api = APIBlueprint("ledger", __name__, abp_security=SECURITY)

    @api.post("/accounts", responses={HTTPStatus.CREATED: Account, **WRITING})
    def open_account(body: NewAccount) -> Response:
        """Open an account with a balance of zero."""
        with engine.begin() as connection:
            row = connection.execute(
                insert(tables.accounts).values(**dict(body)).returning(*tables.accounts.columns)
            ).one()
        return _created("accounts", _account(row))

    @api.get("/accounts/<uuid:account_id>", responses={HTTPStatus.OK: Account, **READING})
    def read_account(path: AccountPath) -> Response:
        """An account with its balance."""
        with engine.connect() as connection:
            row = connection.execute(
                select(tables.accounts).where(tables.accounts.c.id == path.account_id)
            ).one_or_none()
        if row is None:
            raise NotFound(f"account {path.account_id} does not exist")
        return Response(_account(row), mimetype=JSON)

    @api.post("/transfers", responses={HTTPStatus.CREATED: Transfer, **WRITING, **REFUSING})
    def make_transfer(header: TransferHeaders, body: NewTransfer) -> Response:
        """Transfer an amount from an account to another of the same currency."""
        key = Key.of("POST /transfers", header.idempotency_key, body, settings.idempotency_ttl_hours)
        with engine.begin() as connection:
            answer = transfer(connection, body, key, trace.valid(header.traceparent))
        created = answer.status == HTTPStatus.CREATED
        transfers.labels("repeated" if answer.is_repeated else "created" if created else "refused").inc()
        if created:
            return _created("transfers", answer.body)
        return Response(answer.body, answer.status, mimetype=problems.MEDIA_TYPE)

    @api.get("/transfers/<uuid:transfer_id>", responses={HTTPStatus.OK: Transfer, **READING})
    def read_transfer(path: TransferPath) -> Response:
        """A completed transfer."""
        with engine.connect() as connection:
            row = connection.execute(
                select(tables.transfers).where(tables.transfers.c.id == path.transfer_id)
            ).one_or_none()
        if row is None:
            raise NotFound(f"transfer {path.transfer_id} does not exist")
        return Response(_transfer(row), mimetype=JSON)

    return api


def _created(collection: str, body: str) -> Response:
    return Response(body, HTTPStatus.CREATED, {"Location": f"/{collection}/{json.loads(body)['id']}"}, mimetype=JSON)


def _account(row: Row[Any]) -> str:
    return Account(
        id=row.id,
        kind=row.kind,
        currency=row.currency,
        balance=row.balance_minor,
        version=row.version,
        created_at=row.created_at,
    ).model_dump_json()


def _transfer(row: Row[Any]) -> str:
    return Transfer(
        id=row.id,
        from_account=row.from_account_id,
        to_account=row.to_account_id,
        amount=row.amount_minor,
        currency=row.currency,
        created_at=row.created_at,
    ).model_dump_json()
