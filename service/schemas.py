"""Requests and responses: validated by pydantic, described in /openapi.json. Money is in minor units."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from service.ledger import BALANCE_MAX_MINOR, Kind, Status

Currency = Annotated[str, Field(pattern="^[A-Z]{3}$", description="ISO 4217", examples=["EUR"])]
# Strict: 1.0 is rejected, because a larger number in that form would lose its last digits as a float.
Amount = Annotated[
    StrictInt,
    Field(ge=1, le=BALANCE_MAX_MINOR, description="in minor units, written without a fraction", examples=[1250]),
]
Label = Annotated[str, Field(max_length=100, description="what the owner calls it")]
Reason = Annotated[str, Field(min_length=1, max_length=200, examples=["court order"])]


class NewAccount(BaseModel):
    """An account to open."""

    model_config = ConfigDict(extra="forbid")

    currency: Currency
    kind: Kind = Field("user", description="the balance of a system account may fall below zero")
    label: Label = ""


class NewFreeze(BaseModel):
    """Why an account is to be frozen."""

    model_config = ConfigDict(extra="forbid")

    reason: Reason


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


class AccountFreeze(AccountPath, NewFreeze):
    """A freeze of an account: which one, and why."""


class TransferPath(BaseModel):
    """The transfer in the path."""

    transfer_id: UUID


class Account(BaseModel):
    """An account."""

    id: UUID
    kind: Kind
    currency: Currency
    label: str
    status: Status
    balance: int = Field(description="in minor units")
    version: int = Field(description="the number of transfers that have changed its balance")
    created_at: datetime


class AccountStatus(BaseModel):
    """An account after a change of its status."""

    id: UUID
    status: Status
    changed_at: datetime


class Transfer(BaseModel):
    """A completed transfer."""

    id: UUID
    from_account: UUID
    to_account: UUID
    amount: Amount
    currency: Currency
    created_at: datetime
