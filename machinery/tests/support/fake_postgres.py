"""A server that claims to be Postgres, and asks for the password in a way that gives it away, or for none."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from outbox_lab.stack import ports

SCRAM = struct.pack("!cII", b"R", 23, 10) + b"SCRAM-SHA-256\0\0"
CLEAR_TEXT, MD5 = struct.pack("!cII", b"R", 8, 3), struct.pack("!cII4s", b"R", 12, 5, b"salt")
NO_PASSWORD = struct.pack("!cIIcIc", b"R", 8, 0, b"Z", 5, b"I")
STARTUP = 3 << 16  # the protocol's version; other first messages ask for encryption


class FakePostgres:
    """A server that asks clients for a password. ``answers`` has their answers."""

    def __init__(self, questions: Sequence[bytes], listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.answers: list[bytes] = []
        self.logins = 0  # how many clients were asked
        self._questions, self._listener = questions, listener

    def has_got(self, user: str, password: str) -> bool:
        """Whether a client has answered with this password, or with its hash."""
        inner = hashlib.md5(f"{password}{user}".encode(), usedforsecurity=False).hexdigest()
        outer = hashlib.md5(f"{inner}salt".encode(), usedforsecurity=False).hexdigest()
        return any(word.encode() in answer for answer in self.answers for word in (password, outer))

    def serve(self) -> None:
        """Answer clients, one after the other, until the listener is closed."""
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, suppress(ConnectionError, TimeoutError):
                    client.settimeout(10)
                    self._ask(client)

    def _ask(self, client: socket.socket) -> None:
        while len(head := client.recv(8, socket.MSG_WAITALL)) == 8:
            length, version = struct.unpack("!II", head)
            client.recv(length - 8, socket.MSG_WAITALL)
            if version == STARTUP:
                self.logins += 1
                for question in self._questions:
                    client.sendall(question)
                    if answer := client.recv(1024):
                        self.answers.append(answer)
                return
            client.sendall(b"N")


@contextmanager
def listening(*questions: bytes, port: int = 0) -> Iterator[FakePostgres]:
    """A server on a port of loopback until the end of the block. It waits for an answer to each question."""
    with socket.create_server((ports.LOOPBACK, port)) as listener:
        fake = FakePostgres(questions, listener)
        thread = threading.Thread(target=fake.serve)
        thread.start()
        try:
            yield fake
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
