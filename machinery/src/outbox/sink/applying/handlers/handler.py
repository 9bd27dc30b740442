"""Handlers: functions of a service that react to events, each event once in effect.

    @handler("order.placed")
    def send_receipt(event, connection):
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO receipts (order_id) VALUES (%s)", [event.payload["order_id"]])

This is the inbox pattern. A handler is a sink whose target calls a function: the id of the event, and what the function
does on the connection, are committed together or not at all. An effect elsewhere, such as an e-mail, happens at least
once; ``event.id`` is the key by which its receiver can recognise a repetition.

A function that raises loses its own changes alone. Its event becomes a dead letter, later events of the key wait behind
that, and those of other keys go on. It is retried after a while, at most so many times: `outbox dead-letters` shows it
all the time, and replays it on demand. Events of a key come in the order of their versions; without a version there is
no order to keep. Events of different keys come at the same time if the handler has several workers.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from outbox.base.errors import Failure

ATTEMPTS_MAX = 8
Begin = Literal["earliest", "latest"]


class Event(NamedTuple):
    """An event as its handler gets it, upcast to the newest version.

    ``payload`` is what JSON has; numbers with a fraction are Decimal, and properties that are left out are None.
    """

    id: str
    type: str  # as in connect/events: ``order.placed``
    key: str
    version: int | None  # of the key, if its events are numbered
    payload: Mapping[str, Any]


Function = Callable[[Event, Any], Awaitable[None] | None]  # on a psycopg2 connection, or an AsyncConnection


@dataclass(frozen=True)
class Handler:
    """A function, and the events that it is called for. It can be called as the function itself."""

    name: str
    events: Sequence[str]
    function: Function
    attempts: int = ATTEMPTS_MAX
    workers: int = 1
    begin: Begin = "earliest"

    @property
    def is_async(self) -> bool:
        """Whether a call returns what is to be awaited."""
        return any(map(inspect.iscoroutinefunction, (self.function, inspect.unwrap(self.function))))

    def __call__(self, event: Event, connection: Any) -> Awaitable[None] | None:
        return self.function(event, connection)


def handler(
    *events: str, name: str = "", attempts: int = ATTEMPTS_MAX, workers: int = 1, begin: Begin = "earliest"
) -> Callable[[Function], Handler]:
    """Let a function handle events, named as in a job: ``order``, ``order.placed`` or ``order.placed.v1``.

    The function gets an `Event` and the connection, in a transaction that it must not end. It may be ``async``; then
    the connection is an `AsyncConnection`. ``name`` is by default that of the function; the name is what remembers
    which events were handled, so a function can be renamed only with ``name``. ``attempts`` is how often it is called
    for an event that it fails for. ``workers`` is for how many keys at the same time. ``begin`` is where the first
    start begins: with the oldest events that the topics have, or with those that come from then on.
    """

    if not all(isinstance(event, str) for event in events):
        raise Failure("@handler names no event", 'write it as @handler("order.placed")', code="sink-unusable")
    if attempts < 1 or workers < 1 or begin not in get_args(Begin):
        remedy = 'attempts and workers are at least 1, begin is "earliest" or "latest"'
        raise Failure("@handler has a parameter of a wrong value", remedy, code="sink-unusable")

    def decorate(function: Function) -> Handler:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            what = f"handler {function.__name__} is a generator: a call of it would do nothing"
            raise Failure(what, "let it not yield", code="sink-unusable")
        return Handler(name or function.__name__, events, function, attempts, workers, begin)

    return decorate
