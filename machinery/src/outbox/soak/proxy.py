"""A TCP proxy on loopback, to break the link between two parts of the chain: cut it, slow it down, or half-open it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from outbox.stack import ports

CHUNK_BYTES = 64 * 1024
CALL_TIMEOUT_S = 10.0
T = TypeVar("T")


class Proxy:
    """A port that leads to another one. Its state is changed at any time, and holds for connections of before too."""

    def __init__(self, name: str, target_port: int, port: int = 0) -> None:
        """Listen on a port, or on a free one."""
        self.name = name
        self.target_port = target_port
        self.port = port or ports.choose(0)[0]
        self.bytes = 0  # that have passed
        self._delay_s = 0.0
        self._flows = asyncio.Event()  # bytes pass while it is set
        self._ends: set[asyncio.StreamWriter] = set()  # two of each connection
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy {name}", daemon=True)
        self._thread.start()
        self._call(self._open())

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._ends) // 2

    def cut(self) -> int:
        """Close every connection and refuse new ones. Returns how many there were."""
        return self._call(self._cut())

    def freeze(self) -> int:
        """Keep every connection, accept new ones, and let no byte pass, as a network that swallows all packets does.
        Returns how many connections there are.
        """
        return self._call(self._freeze())

    def delay(self, seconds: float) -> int:
        """Let every chunk wait so long. Returns how many connections there are."""
        self._delay_s = seconds
        return self.connections

    def heal(self) -> None:
        """Let everything pass again."""
        self._delay_s = 0.0
        self._call(self._open())

    def close(self) -> None:
        """End it."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In the loop -----------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        self._flows.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, ports.LOOPBACK, self.port)

    async def _freeze(self) -> int:
        self._flows.clear()
        return self.connections

    async def _cut(self) -> int:
        if self._server is not None:
            self._server.close()
            self._server = None
        count = self.connections
        for writer in list(self._ends):
            writer.transport.abort()
        return count

    async def _end(self) -> None:
        await self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            server, to_server = await asyncio.open_connection(ports.LOOPBACK, self.target_port)
        except OSError:
            to_client.transport.abort()
            return
        ends = {to_client, to_server}
        self._ends |= ends
        try:
            await asyncio.gather(self._pump(client, to_server), self._pump(server, to_client))
        finally:
            self._ends -= ends
            for writer in ends:
                writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._flows.wait()
                sink.write(data)
                await sink.drain()
                self.bytes += len(data)
        with suppress(OSError, RuntimeError):
            sink.write_eof()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(CALL_TIMEOUT_S)
