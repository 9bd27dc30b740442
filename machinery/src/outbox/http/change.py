"""A change that a request asks for, the same in any framework: its Idempotency-Key, its transaction, and its answer.

A request claims its key, with its answer, in the transaction that makes the answer true.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from decimal import Decimal
from http import HTTPStatus
from typing import Generic, TypeVar

import msgspec
from pydantic import BaseModel, Field
from sqlalchemy import Connection, text

from outbox.base import spans, trace
from outbox.base.settings import Settings, load
from outbox.events.values import encode
from outbox.http import problems
from outbox.http.gate import Metrics
from outbox.http.problems import KeyReused, Kinds
from outbox.writing.append import append
from outbox.writing.event import Event

C = TypeVar("C")  # a connection of SQLAlchemy, or one for asyncio

CLIENT = "default"  # there is one bearer token; with several, use the client that a token belongs to
KEY_PATTERN = "^[!-~]{1,255}$"
KEY_DESCRIPTION = (
    "Chosen by the client, one per change. The same key with the same request returns the first"
    " response again, including a refusal; with another request it returns 409. Other errors store nothing:"
    " correct the request or wait, and repeat it with the same key. A key is valid for this client and route, and"
    " is kept for OUTBOX_IDEMPOTENCY_TTL_HOURS, by default one day."
)
TRACEPARENT_DESCRIPTION = "W3C trace context; a valid one is copied into the events, an invalid one is ignored"

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
        headers = {"Content-Type": problems.MEDIA_TYPE if is_problem else "application/json"}
        if self.status == HTTPStatus.CREATED and collection:
            headers["Location"] = f"{collection}/{json.loads(self.body)['id']}"
        return headers


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


class WriteHeaders(BaseModel):
    """The headers of a request that changes something."""

    idempotency_key: str = Field(alias="Idempotency-Key", pattern=KEY_PATTERN, description=KEY_DESCRIPTION)
    traceparent: str | None = Field(None, description=TRACEPARENT_DESCRIPTION)


class BaseService:
    """A service: its settings, metrics and refusals."""

    def __init__(self, title: str, settings: Settings | None, refusals: Kinds | None) -> None:
        self.settings = settings or load()
        self.metrics = Metrics()
        self._title, self._refusals = title, dict(refusals or {})

    def _refused(self, refusal: Exception) -> Answer:
        """The answer to a request that the service has refused."""
        problem, _ = problems.of_error(refusal, self._refusals)
        return Answer(problem.status, problems.dump(problem))


class BaseChange(Generic[C]):
    """One change, in its transaction. Its SQL is the same for both adapters; `outbox.asgi` awaits it."""

    def __init__(self, connection: C, key: Key, traceparent: str | None = None) -> None:
        """``connection`` is in the transaction, which the caller commits."""
        self.connection = connection
        self.answer: Answer | None = None
        self._key, self._traceparent = key, trace.valid(traceparent)

    @property
    def claimed(self) -> Answer:
        """The answer that the change has claimed. Raises RuntimeError if it has claimed none."""
        if self.answer is None:
            raise RuntimeError(f"the change of {self._key.route} has claimed no answer")
        return self.answer

    def _claim(self, connection: Connection, made: BaseModel, status: HTTPStatus) -> bool:
        self.answer = first_answer(connection, self._key, Answer(status, encode(made).decode()))
        return not self.answer.is_repeated

    def _append(self, connection: Connection, *events: Event) -> None:
        if not spans.are_recorded():  # else the append's own span gives the events a traceparent
            events = tuple(
                one if one.traceparent is not None else replace(one, traceparent=self._traceparent) for one in events
            )
        append(connection, *events)
