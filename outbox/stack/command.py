"""An `outbox` subcommand as a controlled process: the service, a sink."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import requests

from outbox.base.settings import DOTENV, Settings
from outbox.sink import positions
from outbox.stack.process import Process


class Command(Process):
    """``outbox ARGUMENTS`` with exactly these settings: neither a ``.env`` nor somebody's shell leads it elsewhere."""

    start_timeout_s = 90.0
    stop_timeout_s = 90.0  # a sink finishes its batch, for which it has a minute

    def __init__(
        self,
        name: str,
        settings: Settings,
        arguments: Sequence[str],
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(name, settings.home)
        self._settings = settings
        self._arguments = arguments
        self._ready = ready

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "outbox", *self._arguments]

    def env(self) -> Mapping[str, str]:
        return {**self._settings.as_env(), DOTENV: os.devnull}

    def is_ready(self) -> bool:
        return self._ready()


def service(settings: Settings) -> Command:
    """The service, ready when ``/readyz`` says so."""
    url = f"http://{settings.service_host}:{settings.service_port}/readyz"

    def ready() -> bool:
        try:
            return requests.get(url, timeout=2).ok
        except requests.RequestException:
            return False

    return Command("service", settings, ["serve"], ready)


def sink(settings: Settings, *names: str) -> Command:
    """Sinks in one process, ready once each has ever begun to read its topics."""

    def ready() -> bool:
        return positions.reading(settings).issuperset(names)

    return Command("-".join(["sink", *names]), settings, ["sink", *names], ready)
