"""An `outbox` subcommand as a controlled process: the service, a sink."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from outbox.base import envfile
from outbox.base.settings import DOTENV, PREFIX, Settings, address, variable
from outbox_lab.stack import ports
from outbox_lab.stack.process import KEPT, Process, environment

METRICS = variable("sink_metrics")


class Command(Process):
    """``outbox ARGUMENTS`` with exactly these settings: neither a ``.env`` nor somebody's shell leads it elsewhere.

    It runs code of the project, which may need any other variable of our environment.
    """

    start_timeout_s = 90.0
    stop_timeout_s = 90.0  # a sink finishes its batch, for which it has a minute

    def __init__(self, name: str, settings: Settings, arguments: Sequence[str]) -> None:
        super().__init__(name, settings.home)
        self._settings = settings
        self._arguments = arguments

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "outbox", *self._arguments]

    def env(self) -> Mapping[str, str]:
        own = self._settings.without_secrets(*envfile.secrets_of(*self._arguments[:1]))
        return {**own.as_env(), DOTENV: os.devnull}

    def inherits(self, name: str) -> bool:
        return not name.startswith(PREFIX) or name in KEPT


class SinkProcess(Command):
    """Sinks in one process, ready when its ``/healthz`` says so. Without an address for it they get a free port."""

    start_timeout_s = 180.0  # on a busy machine Spark takes minutes; one that has ended is noticed at once
    poll_s = 0.3

    def env(self) -> Mapping[str, str]:
        given = super().env()
        return {METRICS: f"{ports.LOOPBACK}:{ports.choose(0)[0]}", **given}

    def is_ready(self) -> bool:
        from outbox.sink.running.metrics import HEALTH

        return ports.answers(f"{self.url()}{HEALTH}")

    def url(self) -> str:
        """Where its metrics and its health are. Raises Failure if it has ended."""
        self.require_running()
        return f"http://{environment(psutil.Process(self.pid())).get(METRICS)}"


class ServiceCommand(Command):
    """The service, ready when it listens on its port and its ``/readyz`` says so. Another program may answer there."""

    def prepare(self) -> None:
        ports.require_free(self._port, "service")

    def is_ready(self) -> bool:
        listens = any(ports.listens(one, self._port) for one in self.processes())
        return listens and ports.answers(f"{self.url()}/readyz")

    def url(self) -> str:
        """Where it listens once it is ready."""
        return self._settings.service_url

    @property
    def _port(self) -> int:
        return address(self._settings.service_bind)[1]


def service(settings: Settings) -> ServiceCommand:
    """The service."""
    return ServiceCommand("service", settings, ["serve"])


def sink(settings: Settings, *names: str, plain: bool = False) -> SinkProcess:
    """Sinks in one process, ready when each of them runs; on Spark, or ``plain``."""
    options = ["--plain"] if plain else []
    return SinkProcess("-".join(["sink", *names]), settings, ["sink", *options, *names])
