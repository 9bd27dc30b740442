"""An `outbox` subcommand as a controlled process: the service, a sink."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import requests

from outbox.settings import Settings
from outbox.stack.process import Process


class Command(Process):
    """``outbox ARGUMENTS`` on the stack of a home folder, with some settings of its own (environment variables)."""

    start_timeout_s = 90.0

    def __init__(
        self,
        name: str,
        home: Path,
        arguments: Sequence[str],
        env: Mapping[str, str] | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(name, home)
        self._arguments = arguments
        self._env = dict(env or {})
        self._ready = ready

    def argv(self) -> Sequence[str | Path]:
        return [sys.executable, "-m", "outbox", *self._arguments]

    def env(self) -> Mapping[str, str]:
        return {"OUTBOX_HOME": str(self.home), **self._env}

    def is_ready(self) -> bool:
        return self._ready()


def service(settings: Settings) -> Command:
    """The ledger service, ready when it says so."""
    url = f"http://{settings.service_host}:{settings.service_port}/readyz"

    def ready() -> bool:
        try:
            return requests.get(url, timeout=2).ok
        except requests.RequestException:
            return False

    return Command("service", settings.home, ["serve"], ready=ready)
