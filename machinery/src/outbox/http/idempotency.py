"""Idempotency-Keys: a request claims its key, with its response, in the transaction that makes the response true."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from decimal import Decimal
from http import HTTPStatus

import msgspec
from sqlalchemy import Connection, text

PROBLEM = "application/problem+json"  # RFC 9457
CLIENT = "default"  # there is one bearer token; with several, use the client that a token belongs to

_canonical = msgspec.json.Encoder(order="deterministic", decimal_format="number").encode


@dataclass(frozen=True)
class Key:
    """The key of one request, and a hash of the request that uses it."""

    route: str
    key: str
    request_hash: bytes
    ttl_hours: int
    client: str = CLIENT

    @classmethod
    def of_request(
        cls, key: str, ttl_hours: int, *, method: str, route: str, path: str, query: bytes, body: bytes
    ) -> Key:
        """The key of a request. Its method, path, query and JSON body decide the hash, not what a model makes of them.

        A body may be written with other white space, escapes or order of its properties; an empty object is no body.
        """
        if body:
            # Every body is a JSON object (outbox.http.body). A float would lose the last digits of a number.
            fields = json.loads(body, parse_float=Decimal)
            body = _canonical(fields) if fields else b""
        identity = msgspec.msgpack.encode((method, path, query, body))
        return cls(f"{method} {route}", key, hashlib.sha256(identity).digest(), ttl_hours)


@dataclass(frozen=True)
class Answer:
    """The response to a request: HTTP status and JSON."""

    status: int
    body: str
    is_repeated: bool = False

    def headers(self, collection: str) -> dict[str, str]:
        """Headers of the response. If it has made something, ``Location`` says where in ``collection`` that is, by its
        id.
        """
        is_problem = self.status >= HTTPStatus.BAD_REQUEST
        headers = {"Content-Type": PROBLEM if is_problem else "application/json"}
        if self.status == HTTPStatus.CREATED and collection:
            headers["Location"] = f"{collection}/{json.loads(self.body)['id']}"
        return headers


class KeyReused(Exception):
    def __init__(self) -> None:
        super().__init__("the Idempotency-Key was used for another request")


# An expired key counts as absent. Each claim also deletes two expired keys, so the table stays as small as the traffic
# of one TTL and needs no clean-up job. A claim skips expired keys that another transaction has locked.
_CLAIM = text("""
    WITH expired AS (
        DELETE FROM public.idempotency_keys
         WHERE (client, route, key) IN (
               SELECT client, route, key
                 FROM public.idempotency_keys
                WHERE expires_at <= now() AND (client, route, key) <> (:client, :route, :key)
                ORDER BY expires_at
                LIMIT 2
                  FOR UPDATE SKIP LOCKED)
    )
    INSERT INTO public.idempotency_keys AS taken (client, route, key, request_hash, status, body, expires_at)
    VALUES (:client, :route, :key, :request_hash, :status, :body, now() + make_interval(hours => :ttl_hours))
    ON CONFLICT (client, route, key) DO UPDATE
       SET request_hash = excluded.request_hash, status = excluded.status, body = excluded.body,
           expires_at = excluded.expires_at
     WHERE taken.expires_at <= now()
""")
_FIRST = text("""
    SELECT request_hash, status, body FROM public.idempotency_keys
     WHERE (client, route, key) = (:client, :route, :key)
""")


def first_answer(connection: Connection, key: Key, answer: Answer) -> Answer:
    """Claim the key for this answer and return it; if the key is taken, return the answer that claimed it.

    One statement checks and claims, so no other request can slip in between. It waits for a transaction that has
    claimed the same key; if that transaction rolls back, the key is ours. Raises KeyReused if another request has
    claimed the key.
    """
    if connection.execute(_CLAIM, {**vars(key), "status": answer.status, "body": answer.body}).rowcount:
        return answer
    # The claim has locked the taken key, so that no other claim deletes it if it expires now.
    first = connection.execute(_FIRST, vars(key)).one()
    if bytes(first.request_hash) != key.request_hash:
        raise KeyReused
    return Answer(first.status, first.body, is_repeated=True)


def claimed(answer: Answer | None, key: Key) -> Answer:
    """The answer that a change has claimed. Raises RuntimeError if it has claimed none."""
    if answer is None:
        raise RuntimeError(f"the change of {key.route} has claimed no answer")
    return answer
