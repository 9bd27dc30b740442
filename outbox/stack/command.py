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


def sink(settings: Settings, *strategies: str) -> Command:
    """The sinks of these strategies in one process, ready once each has ever begun to read the topic."""

    def ready() -> bool:
        return positions.reading(settings).issuperset(strategies)

    options = [word for strategy in strategies for word in ("--strategy", strategy)]
    return Command("-".join(["sink", *strategies]), settings, ["sink", *options], ready)
