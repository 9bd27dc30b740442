"""A TCP proxy on loopback, to break the link between two parts of the chain: cut it, slow it down, or half-open it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from outbox_lab.stack import ports

CHUNK_BYTES = 64 * 1024
CALL_TIMEOUT_S = 10.0
T = TypeVar("T")


class Proxy:
    """A port that leads to another one. Its state is changed at any time, and holds for connections of before too."""

    def __init__(self, name: str, target_port: int) -> None:
        """Listen on a free port."""
        self.name = name
        self.target_port = target_port
        self.port = ports.choose(0)[0]
        self.bytes = 0  # that have passed
        self.affected = 0  # since the link was broken: connections that ended, or chunks that were held or delayed
        self._delay_s = 0.0
        self._flows = asyncio.Event()  # bytes to the port pass while it is set
        self._answers_flow = asyncio.Event()  # and bytes from it while this is set
        self._ends: set[asyncio.StreamWriter] = set()  # two of each connection
        self._tasks: set[asyncio.Task[None]] = set()  # the loop alone does not keep them
        self._listening: socket.socket | None = None
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

    def hold(self, *, requests: bool = True, answers: bool = True) -> int:
        """Keep every connection, accept new ones, and let no byte pass, as a network that swallows all packets does; or
        none of what clients send, or of what they get. Returns how many connections there are.
        """
        return self._call(self._hold(requests=requests, answers=answers))

    def delay(self, seconds: float) -> int:
        """Let every chunk wait so long. Returns how many connections there are."""
        return self._call(self._hold(delay_s=seconds))

    def heal(self) -> None:
        """Let everything pass again."""
        self._call(self._open())

    def close(self) -> None:
        """End it."""
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In the loop -----------------------------------------------------------------------------------------------------

    # No asyncio.Server: one that is closed while it accepts a connection never closes that one.

    async def _open(self) -> None:
        self._delay_s = 0.0
        self._flows.set()
        self._answers_flow.set()
        if self._listening is None:
            self._listening = socket.create_server((ports.LOOPBACK, self.port))
            self._listening.setblocking(False)
            self._loop.add_reader(self._listening, self._accept, self._listening)

    async def _hold(self, *, requests: bool = False, answers: bool = False, delay_s: float = 0.0) -> int:
        self.affected = 0
        self._delay_s = delay_s
        if requests:
            self._flows.clear()
        if answers:
            self._answers_flow.clear()
        return self.connections

    async def _cut(self) -> int:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        self.affected = self.connections
        for writer in list(self._ends):
            writer.transport.abort()
        return self.affected

    async def _end(self) -> None:
        await self._cut()
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            done, _ = await asyncio.wait(self._tasks)
            self._tasks -= done
        await asyncio.sleep(0.0)  # a transport closes its socket in the next turn

    def _accept(self, listening: socket.socket) -> None:
        with suppress(BlockingIOError, ConnectionError):  # the client has left already
            client, _ = listening.accept()
            task = self._loop.create_task(self._lead(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            # Cancelled before its first step, it closes nothing.
            task.add_done_callback(lambda done: client.close() if done.cancelled() else None)

    async def _lead(self, accepted: socket.socket) -> None:
        """Pass everything on, both ways, until one side ends the connection."""
        client, to_client = await asyncio.open_connection(sock=accepted)
        ends = {to_client}
        try:
            server, to_server = await asyncio.open_connection(ports.LOOPBACK, self.target_port)
            ends.add(to_server)
            if self._listening is None:
                raise ConnectionAbortedError("the link was cut meanwhile")
            self._ends |= ends
            await asyncio.gather(
                self._pump(client, to_server, self._flows), self._pump(server, to_client, self._answers_flow)
            )
        except (OSError, asyncio.CancelledError):  # nobody listens there, or the proxy ends
            for writer in ends:
                writer.transport.abort()
        finally:
            self._ends -= ends
            for writer in ends:
                writer.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, flows: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                    self.affected += 1
                if not flows.is_set():
                    self.affected += 1
                    await flows.wait()
                sink.write(data)
                await sink.drain()
                self.bytes += len(data)
        with suppress(OSError, RuntimeError):
            sink.write_eof()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        done: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result(CALL_TIMEOUT_S)
