"""Async functions of handlers: all of a process run in one event loop, and their statements in other threads.

So a client that belongs to a loop can be shared by all calls. A statement that waits for a lock does not keep the loop
from the call that has the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

    from psycopg2 import extensions

T = TypeVar("T")
_starting = threading.Lock()


class AsyncConnection:
    """The connection that an async function gets, for as long as its call lasts."""

    def __init__(self, connection: extensions.connection) -> None:
        self._connection = connection
        self._jobs = SimpleQueue[Callable[[], None] | None]()
        self._is_over = False

    async def execute(self, statement: str, parameters: Sequence[Any] | dict[str, Any] | None = None) -> list[Any]:
        """Execute a statement with psycopg2's placeholders. Returns its rows, if it has any."""

        def execute(connection: extensions.connection) -> list[Any]:
            with connection.cursor() as cursor:
                cursor.execute(statement, parameters)
                return cursor.fetchall() if cursor.description else []

        return await self.run(execute)

    async def run(self, function: Callable[[extensions.connection], T]) -> T:
        """Call a function with the psycopg2 connection, in a thread that may wait. Returns what that returns."""
        import asyncio

        if self._is_over:
            raise RuntimeError("the connection is used after the end of the call")
        future = Future[T]()
        self._jobs.put(lambda: _fulfil(future, lambda: function(self._connection)))
        return await asyncio.wrap_future(future)

    def finish(self, result: Awaitable[None]) -> None:
        """Await the result of a call in the loop, and run its statements in this thread meanwhile. Raises its error."""
        import asyncio

        async def finished() -> BaseException | None:
            try:
                await result
            except BaseException as error:  # SystemExit would end the loop
                return error
            return None

        done = asyncio.run_coroutine_threadsafe(finished(), _loop())
        done.add_done_callback(lambda _: self._jobs.put(None))
        while (job := self._jobs.get()) is not None:
            job()
        self._is_over = True
        if (error := done.result()) is not None:
            raise error


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:
        return _started()


@cache
def _started() -> asyncio.AbstractEventLoop:
    import asyncio  # takes long

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async handlers", daemon=True).start()
    return loop
