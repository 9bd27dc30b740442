"""Idempotency-Keys: a key is claimed with its answer, in the transaction that makes the answer true."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pydantic import BaseModel
from sqlalchemy import Connection, select, text

from service.tables import idempotency_keys as keys

CLIENT = "default"  # there is one bearer token; with several, the client that a token belongs to


@dataclass(frozen=True)
class Key:
    """The key of one request, and what it was used for."""

    route: str
    key: str
    request_hash: bytes
    ttl_hours: int
    client: str = CLIENT

    @classmethod
    def of(cls, route: str, key: str, body: BaseModel, ttl_hours: int) -> Key:
        """The key of a request. Bodies that mean the same, however they were written, are the same."""
        return cls(route, key, hashlib.sha256(body.model_dump_json().encode()).digest(), ttl_hours)


@dataclass(frozen=True)
class Answer:
    """What a request was answered: HTTP status, and JSON."""

    status: int
    body: str
    is_repeated: bool = False


class KeyReused(Exception):
    """The key was used for another request."""


# An expired key is taken over as if it were not there. And each claim carries two expired ones away, so that the table
# stays as small as a day's traffic without a job to run; those that somebody else looks at are skipped, not waited for.
_CLAIM = text("""
    WITH forgotten AS (
        DELETE FROM idempotency_keys
         WHERE (client, route, key) IN (
               SELECT client, route, key
                 FROM idempotency_keys
                WHERE expires_at <= now() AND (client, route, key) <> (:client, :route, :key)
                ORDER BY expires_at
                LIMIT 2
                  FOR UPDATE SKIP LOCKED)
    )
    INSERT INTO idempotency_keys AS taken (client, route, key, request_hash, status, body, expires_at)
    VALUES (:client, :route, :key, :request_hash, :status, :body, now() + make_interval(hours => :ttl_hours))
    ON CONFLICT (client, route, key) DO UPDATE
       SET request_hash = excluded.request_hash, status = excluded.status, body = excluded.body,
           expires_at = excluded.expires_at
     WHERE taken.expires_at <= now()
""")


def first_answer(connection: Connection, key: Key, answer: Answer) -> Answer:
    """Claim the key for this answer and return it; if the key is taken, return the answer that it was taken for.

    There is no look before the claim that another request could slip behind. A transaction that has just claimed the
    same key is waited for; if it is rolled back, the key is ours. Raises KeyReused if the key was taken by another
    request.
    """
    claimed = connection.execute(_CLAIM, {**vars(key), "status": answer.status, "body": answer.body}).rowcount
    if claimed:
        return answer
    first = connection.execute(
        select(keys.c.request_hash, keys.c.status, keys.c.body).where(
            keys.c.client == key.client, keys.c.route == key.route, keys.c.key == key.key
        )
    ).one()
    if first.request_hash != key.request_hash:
        raise KeyReused
    return Answer(first.status, first.body, is_repeated=True)
