"""Clients that make transfers: by the write function, over HTTP, and with a dual write instead of the outbox."""

from __future__ import annotations

import json
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from confluent_kafka import Producer
from outbox.base.settings import DOTENV, Settings
from outbox.http.change import Key
from outbox.http.database import make_engine
from outbox.kafka.clients import client_config
from outbox.web import Change
from outbox.writing.event import Event
from outbox_lab.stack.command import service
from outbox_lab.stack.process import Process

from bench.event import topic
from service.schemas import NewTransfer
from service.transfer import transfer

FLUSH_TIMEOUT_S = 60.0


class Load(NamedTuple):
    """So many clients at once, with transfers between so many accounts, for so long."""

    settings: Settings
    clients: int
    accounts: int
    duration_s: float

    def wanted(self) -> NewTransfer:
        """A transfer between two of the accounts."""
        low, high = sorted(random.sample(range(1, self.accounts + 1), 2))
        return NewTransfer(from_account=uuid.UUID(int=low), to_account=uuid.UUID(int=high), amount=1)


Client = Callable[[Load], AbstractContextManager[Callable[[], None]]]
"""A function of this module that prepares a client, and returns what the client calls for a transfer."""


@contextmanager
def function(load: Load) -> Iterator[Callable[[], None]]:
    """Calls the write function."""
    engine = make_engine(load.settings)
    engine.connect().close()

    def make() -> None:
        wanted = load.wanted()
        with engine.begin() as connection:
            transfer(Change(connection, Key("bench", str(uuid.uuid4()), b"", ttl_hours=24)), wanted)

    yield make


@contextmanager
def without_outbox(load: Load) -> Iterator[Callable[[], None]]:
    """Calls the write function, which writes no events."""
    with patch("outbox.http.change.append"), function(load) as make:
        yield make


@contextmanager
def dual_write(load: Load) -> Iterator[Callable[[], None]]:
    """Calls the write function, which writes no events, and sends them itself; they are lost if it dies in between."""
    producer = Producer({**client_config(load.settings), "acks": "all", "linger.ms": 0})
    events: list[Event] = []

    def keep(_connection: object, *new: Event) -> None:
        events.extend(new)

    with patch("outbox.http.change.append", keep), function(load) as transferred:

        def make() -> None:
            transferred()
            for one in events:
                producer.produce(topic(load.settings), json.dumps(one.payload), one.aggregateid)
            events.clear()
            if producer.flush(FLUSH_TIMEOUT_S):
                raise TimeoutError("Kafka has not taken the events of a transfer")

        yield make


@contextmanager
def over_http(load: Load) -> Iterator[Callable[[], None]]:
    """Sends requests to the service, one after the other on one connection."""
    settings = load.settings
    authorization = f"Bearer {settings.service_token.get_secret_value()}"
    with closing(HTTPConnection(settings.service_bind)) as connection:

        def make() -> None:
            headers = {
                "Authorization": authorization,
                "Content-Type": "application/json",
                "Idempotency-Key": str(uuid.uuid4()),
            }
            connection.request("POST", "/transfers", load.wanted().model_dump_json(), headers)
            response = connection.getresponse()
            body = response.read()
            if response.status != 201:
                raise ValueError(f"status {response.status}: {body.decode()}")

        yield make


def create_app_without_outbox() -> Any:
    """The service, whose write function writes no events."""
    from service.app import create_app

    patch("outbox.http.change.append").start()
    return create_app()


class Server(Process):
    """The service under gunicorn, by the function that makes it."""

    def __init__(self, settings: Settings, app: str) -> None:
        super().__init__("service", settings.home)
        self._settings = settings
        self._app = app

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "gunicorn", "--config", "python:outbox.http.serving", self._app]

    def env(self) -> Mapping[str, str]:
        counted = self.folder / "metrics"
        counted.mkdir(exist_ok=True)
        return {
            **self._settings.as_env(),
            DOTENV: os.devnull,
            "PROMETHEUS_MULTIPROC_DIR": str(counted),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }

    def is_ready(self) -> bool:
        return service(self._settings).is_ready()


@contextmanager
def served(settings: Settings, app: str) -> Iterator[None]:
    """The service runs."""
    server = Server(settings, app)
    server.start()
    try:
        yield
    finally:
        server.stop()
