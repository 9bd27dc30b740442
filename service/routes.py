"""The HTTP API: a schema validates the input of each route; the route does one thing in one transaction."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from prometheus_client import Counter
from pydantic import BaseModel
from sqlalchemy import Engine, Row, select
from werkzeug.exceptions import NotFound

from outbox.base import trace
from outbox.base.settings import Settings
from outbox.http import problems
from outbox.http.auth import SECURITY
from outbox.http.idempotency import Answer, Key
from outbox.http.problems import READING, WRITING, responses
from service import tables
from service.account import close, freeze, open_account
from service.schemas import (
    Account,
    AccountFreeze,
    AccountPath,
    AccountStatus,
    NewAccount,
    NewClosing,
    NewFreeze,
    NewTransfer,
    Transfer,
    TransferPath,
    WriteHeaders,
)
from service.transfer import transfer

JSON = "application/json"
REFUSING = responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


def ledger_api(engine: Engine, transfers: Counter, settings: Settings) -> APIBlueprint:
    """The routes of the ledger."""
    api = APIBlueprint("ledger", __name__, abp_security=SECURITY)

    def claim(route: str, header: WriteHeaders, body: BaseModel) -> Key:
        return Key.of(f"POST {route}", header.idempotency_key, body, settings.idempotency_ttl_hours)

    @api.post("/accounts", responses={HTTPStatus.CREATED: Account, **WRITING, **responses(HTTPStatus.CONFLICT)})
    def make_account(header: WriteHeaders, body: NewAccount) -> Response:
        """Open an account with a balance of zero."""
        key = claim("/accounts", header, body)
        with engine.begin() as connection:
            return _response(open_account(connection, body, key, trace.valid(header.traceparent)), "accounts")

    @api.post("/accounts/<uuid:account_id>/freeze", responses={HTTPStatus.OK: AccountStatus, **WRITING, **REFUSING})
    def freeze_account(header: WriteHeaders, path: AccountPath, body: NewFreeze) -> Response:
        """Let an account take part in no more transfers."""
        wanted = AccountFreeze(account_id=path.account_id, reason=body.reason)
        key = claim("/accounts/{account_id}/freeze", header, wanted)
        with engine.begin() as connection:
            return _response(freeze(connection, wanted, key, trace.valid(header.traceparent)))

    @api.post("/accounts/<uuid:account_id>/close", responses={HTTPStatus.OK: AccountStatus, **WRITING, **REFUSING})
    def close_account(header: WriteHeaders, path: AccountPath, body: NewClosing) -> Response:
        """Close an account for good. Its balance must be zero."""
        del body
        key = claim("/accounts/{account_id}/close", header, path)
        with engine.begin() as connection:
            return _response(close(connection, path, key, trace.valid(header.traceparent)))

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
    def make_transfer(header: WriteHeaders, body: NewTransfer) -> Response:
        """Transfer an amount from an account to another of the same currency."""
        key = claim("/transfers", header, body)
        with engine.begin() as connection:
            answer = transfer(connection, body, key, trace.valid(header.traceparent))
        created = answer.status == HTTPStatus.CREATED
        transfers.labels("repeated" if answer.is_repeated else "created" if created else "refused").inc()
        return _response(answer, "transfers")

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


def _response(answer: Answer, collection: str = "") -> Response:
    """The response of an answer; one that has made something says where in ``collection`` it is."""
    if answer.status >= HTTPStatus.BAD_REQUEST:
        return Response(answer.body, answer.status, mimetype=problems.MEDIA_TYPE)
    response = Response(answer.body, answer.status, mimetype=JSON)
    if answer.status == HTTPStatus.CREATED:
        response.headers["Location"] = f"/{collection}/{json.loads(answer.body)['id']}"
    return response


def _account(row: Row[Any]) -> str:
    return Account(
        id=row.id,
        kind=row.kind,
        currency=row.currency,
        label=row.label,
        status=row.status,
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
