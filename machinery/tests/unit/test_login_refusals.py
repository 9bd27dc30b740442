"""Why a login failed: for good, or for now. A sink starts again after the second kind (`outbox.sink.running.retries`).

And what a server gets that only pretends to be ours.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from outbox.base import database
from outbox.base.errors import Failure
from outbox.base.settings import Settings, SinkRole, load
from outbox.http.database import make_engine
from outbox_lab.stack import ports
from outbox_lab.stack.postgres import Postgres

SERVER = 'connection to server at "127.0.0.1", port 15041 failed: FATAL:  '


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("could not write init file: No space left on device", "database-unavailable"),
        ("the database system is in recovery mode", "database-unavailable"),
        ('password authentication failed for user "x"', "database-login-refused"),
        ('role "x" does not exist', "database-login-refused"),
    ],
)
def test_a_login_that_fails_for_now_is_not_refused_for_good(tmp_path: Path, said: str, code: str) -> None:
    settings = load(tmp_path, environment=False)
    assert database.refusal_of(settings, SinkRole.WRITER, [SERVER + said])[2] == code


PASSWORD = "a-secret"
NO_PASSWORD, CLEAR_TEXT, MD5 = (struct.pack(">i", code) for code in (0, 3, 5))


@contextmanager
def pretender(asks: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """A port where something speaks Postgres and asks for a password in some way; and what it got."""
    got: list[bytes] = []

    def answer(client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(10)
            while client.recv(4096)[4:8] in (b"\x04\xd2\x16\x2f", b"\x04\xd2\x16\x30"):  # TLS or GSS?
                client.sendall(b"N")
            client.sendall(b"R" + struct.pack(">i", 4 + len(asks)) + asks)
            if asks == NO_PASSWORD:
                client.sendall(b"Z" + struct.pack(">i", 5) + b"I")
            got.append(client.recv(4096))

    def serve() -> None:
        with suppress(OSError):
            while True:
                answer(server.accept()[0])

    with socket.create_server((ports.LOOPBACK, 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], got
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def to(port: int, home: Path) -> Settings:
    names = ("stack_postgres_password", "source_db_app_password", "sink_db_writer_password")
    return load(home, environment=False, source_db_port=port, sink_db_port=port, **dict.fromkeys(names, PASSWORD))


@pytest.mark.parametrize("asks", [CLEAR_TEXT, MD5 + b"salt", NO_PASSWORD])
def test_a_process_that_takes_the_port_gets_no_password(asks: bytes, tmp_path: Path) -> None:
    with pretender(asks) as (port, got):
        settings = to(port, tmp_path)
        with pytest.raises(Failure) as refused:
            database.connect(settings, SinkRole.WRITER).close()
        with pytest.raises(OperationalError), make_engine(settings).connect():
            pass
        assert not Postgres(settings).is_ready()
    assert got == [b"", b"", b""]
    assert refused.value.code == "database-login-refused"
    assert "OUTBOX_SINK_DB_SSLMODE=verify-full" in str(refused.value)
