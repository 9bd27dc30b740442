"""What goes over HTTP, checked by pydantic; /openapi.json is made of it. Money in minor units of the currency."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from service.ledger import BALANCE_MAX_MINOR, Kind

Currency = Annotated[str, Field(pattern="^[A-Z]{3}$", description="ISO 4217", examples=["EUR"])]
# Strict: 1.0 is refused, as a larger number written like that would lose its last digits on the way in.
Amount = Annotated[
    StrictInt,
    Field(ge=1, le=BALANCE_MAX_MINOR, description="in minor units, written without a fraction", examples=[1250]),
]


class NewAccount(BaseModel):
    """An account to open."""

    model_config = ConfigDict(extra="forbid")

    currency: Currency
    kind: Kind = Field("user", description="the balance of a system account may fall below zero")


class NewTransfer(BaseModel):
    """A transfer to make."""

    model_config = ConfigDict(extra="forbid")

    from_account: UUID
    to_account: UUID
    amount: Amount

    @field_validator("to_account")
    @classmethod
    def _is_another(cls, to_account: UUID, info: ValidationInfo) -> UUID:
        if to_account == info.data.get("from_account"):
            raise PydanticCustomError("same_account", "Input should be another account than from_account")
        return to_account


class AccountPath(BaseModel):
    """The account in the path."""

    account_id: UUID


class TransferPath(BaseModel):
    """The transfer in the path."""

    transfer_id: UUID


class TransferHeaders(BaseModel):
    """The headers of a transfer's request."""

    idempotency_key: str = Field(
        alias="Idempotency-Key",
        pattern="^[!-~]{1,255}$",
        description="Chosen by the client, one for each transfer. The same key with the same body gives the first"
        " answer again, be it 201, 404 or 409; with another body it gives 409. Other errors leave no trace: mend the"
        " request or wait, and repeat it with the same key. A key counts for this client and route, and is remembered"
        " for OUTBOX_IDEMPOTENCY_TTL_HOURS, a day if not set.",
    )
    traceparent: str | None = Field(
        None,
        description="W3C trace context; a valid one goes into the events, any other is ignored, and none is made up",
    )


class Account(BaseModel):
    """An account."""

    id: UUID
    kind: Kind
    currency: Currency
    balance: int = Field(description="in minor units")
    version: int = Field(description="how many transfers have changed it")
    created_at: datetime


class Transfer(BaseModel):
    """A transfer that was made."""

    id: UUID
    from_account: UUID
    to_account: UUID
    amount: Amount
    currency: Currency
    created_at: datetime


class FieldError(BaseModel):
    """One field that is wrong."""

    field: str = Field(description="its name; empty for the whole body")
    detail: str


class Problem(BaseModel):
    """An error, as RFC 9457 wants it (application/problem+json)."""

    type: str = Field("about:blank", description="tells errors of the same status apart")
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = Field(None, description="the fields that are wrong")


class Health(BaseModel):
    """It is well; else there is an error."""

    status: Literal["ok"] = "ok"
