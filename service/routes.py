"""The HTTP API: a schema validates the input of each route; the route does one thing in one transaction."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from flask import Response
from flask_openapi3.blueprint import APIBlueprint
from outbox.web import READING, SECURITY, WRITING, Service, WriteHeaders, responses
from prometheus_client import Counter
from sqlalchemy import Row, select
from werkzeug.exceptions import NotFound

from service import tables
from service.account import close, freeze, open_account
from service.schemas import (
    Account,
    AccountFreeze,
    AccountPath,
    AccountStatus,
    NewAccount,
    NewFreeze,
    NewTransfer,
    Transfer,
    TransferPath,
)
from service.transfer import transfer

JSON = "application/json"
REFUSING = responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT)


def ledger_api(service: Service, transfers: Counter) -> APIBlueprint:
    """The routes of the ledger."""
    api = APIBlueprint("ledger", __name__, abp_security=SECURITY)

    @api.post("/accounts", responses={HTTPStatus.CREATED: Account, **WRITING, **responses(HTTPStatus.CONFLICT)})
    def make_account(header: WriteHeaders, body: NewAccount) -> Response:
        """Open an account with a balance of zero."""
        return service.answer(header, body, open_account).response("/accounts")

    @api.post("/accounts/<uuid:account_id>/freeze", responses={HTTPStatus.OK: AccountStatus, **WRITING, **REFUSING})
    def freeze_account(header: WriteHeaders, path: AccountPath, body: NewFreeze) -> Response:
        """Let an account take part in no more transfers."""
        wanted = AccountFreeze(account_id=path.account_id, reason=body.reason)
        return service.answer(header, wanted, freeze).response()

    @api.post("/accounts/<uuid:account_id>/close", responses={HTTPStatus.OK: AccountStatus, **WRITING, **REFUSING})
    def close_account(header: WriteHeaders, path: AccountPath) -> Response:
        """Close an account for good. Its balance must be zero."""
        return service.answer(header, path, close).response()

    @api.get("/accounts/<uuid:account_id>", responses={HTTPStatus.OK: Account, **READING})
    def read_account(path: AccountPath) -> Response:
        """An account with its balance."""
        with service.engine.connect() as connection:
            row = connection.execute(
                select(tables.accounts).where(tables.accounts.c.id == path.account_id)
            ).one_or_none()
        if row is None:
            raise NotFound(f"account {path.account_id} does not exist")
        return Response(_account(row), mimetype=JSON)

    @api.post("/transfers", responses={HTTPStatus.CREATED: Transfer, **WRITING, **REFUSING})
    def make_transfer(header: WriteHeaders, body: NewTransfer) -> Response:
        """Transfer an amount from an account to another of the same currency."""
        answer = service.answer(header, body, transfer)
        created = answer.status == HTTPStatus.CREATED
        transfers.labels("repeated" if answer.is_repeated else "created" if created else "refused").inc()
        return answer.response("/transfers")

    @api.get("/transfers/<uuid:transfer_id>", responses={HTTPStatus.OK: Transfer, **READING})
    def read_transfer(path: TransferPath) -> Response:
        """A completed transfer."""
        with service.engine.connect() as connection:
            row = connection.execute(
                select(tables.transfers).where(tables.transfers.c.id == path.transfer_id)
            ).one_or_none()
        if row is None:
            raise NotFound(f"transfer {path.transfer_id} does not exist")
        return Response(_transfer(row), mimetype=JSON)

    return api


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
