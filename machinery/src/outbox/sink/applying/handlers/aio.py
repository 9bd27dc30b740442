"""Async functions of handlers: all of a process run in one event loop, and their statements in other threads.

So a client that belongs to a loop can be shared by all calls. A statement that waits for a lock does not keep the loop
from the call that has the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from outbox.base.errors import Failure
from outbox.base.heavy import asyncio
from outbox.base.wait import in_thread, timeout_scale

if TYPE_CHECKING:
    from psycopg2 import extensions

T = TypeVar("T")
BLOCKED_S = 30.0  # of a loop that begins no call
_starting = threading.Lock()


class LoopBlockedError(Failure):
    """The event loop begins no calls any more. Another one would not do: clients of functions belong to this one."""


class AsyncConnection:
    """The connection that an async function gets, for as long as its call lasts."""

    def __init__(self, connection: extensions.connection) -> None:
        self._connection: extensions.connection | None = connection
        self._using = threading.Lock()  # a cancelled call does not end its statement, which must not come later

    async def execute(self, statement: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> list[Any]:
        """Execute a statement with psycopg2's placeholders. Returns its rows, if it has any."""

        def execute(connection: extensions.connection) -> list[Any]:
            with connection.cursor() as cursor:
                cursor.execute(statement, parameters or None)
                return cursor.fetchall() if cursor.description else []

        return await self.run(execute)

    async def run(self, function: Callable[[extensions.connection], T]) -> T:
        """Call a function with the psycopg2 connection, in a thread that may wait. Returns what that returns."""

        def use() -> T:
            with self._using:
                if self._connection is None:
                    raise RuntimeError("the connection is used after the end of the call")
                return function(self._connection)

        return await asyncio.to_thread(use)

    def finish(self, result: Awaitable[None]) -> None:
        """Wait until the loop has awaited the result of a call, and for what is still executed. Raises its error, and
        LoopBlockedError if another call keeps the loop from it.
        """
        begun = threading.Event()

        async def finished() -> BaseException | None:
            begun.set()
            try:
                await result
            except BaseException as error:  # SystemExit would end the loop
                return error
            return None

        with _starting:
            loop = _loop()
        called = asyncio.run_coroutine_threadsafe(finished(), loop)
        if not begun.wait(BLOCKED_S * timeout_scale()):
            called.cancel()
            self._connection = None
            what = f"an async handler has blocked the event loop for {BLOCKED_S:g} s"
            raise LoopBlockedError(what, "let it await, and give its calls a timeout", code="event-loop-blocked")
        error = called.result()
        with self._using:
            self._connection = None
        if error is not None:
            raise error


class _Threads(ThreadPoolExecutor):
    """As many threads as there are calls, for each may wait for a lock. They do not keep the process from its end."""

    def submit(self, function: Callable[..., T], /, *given: Any, **named: Any) -> Future[T]:
        return in_thread("async handlers", partial(function, *given, **named))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_default_executor(_Threads())
    threading.Thread(target=_run, args=[loop], name="async handlers", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        with suppress(BaseException):  # SystemExit of a task, which has it too; it would end the loop of all calls
            loop.run_forever()
