"""The chain in the containers of docker-compose, seen from a container beside them.

No Docker socket is needed. The containers of the worker, the sinks and the walkthrough share a PID namespace, so their
processes are visible and can be killed. Docker starts a container again whose process has ended.

The worker reads its exactly-once mode from a file that it shares with the walkthrough. The file counts only as long as
the walkthrough runs that has written it: if that is killed, the worker's next start is as configured.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import Settings, load
from outbox.base.terminal import Progress
from outbox.base.wait import wait_for
from outbox.relay import lifecycle
from outbox.sink import discovery
from outbox.sink.running import metrics
from outbox_lab.stack import ports
from outbox_lab.stack.process import Process, lives, send
from outbox_lab.walkthrough import workload
from outbox_lab.walkthrough.chain import Chain

WORKER_CLASS = "org.apache.kafka.connect.cli.ConnectDistributed"
MODE_FILE = "exactly-once"
SINK_HOSTS = ("sink", "sink-naive")  # the services of docker-compose.yml that run sinks
SINK_PORT = 9400
END_TIMEOUT_S = 90.0  # a sink finishes its batch, for which it has a minute
START_TIMEOUT_S = 180.0

Find = Callable[[], Iterable[psutil.Process]]


class Container(Process):
    """The main processes of one or more containers, which Docker starts again when they have ended."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        find: Find,
        *,
        count: int,
        owns: Callable[[Sequence[str]], bool],
        urls: Sequence[str],
        login: tuple[str, str] | None = None,
    ):
        """``owns`` recognises a main process by its command line; there are ``count`` of them. Ready: all ``urls``
        answer, with this ``login``.
        """
        super().__init__(name, settings.home)
        self._count = count
        self._is_main = owns
        self._urls = urls
        self._find = find
        self._login = login
        self._started: list[psutil.Process] = []  # since the last start that we have seen

    def start(self) -> None:
        def all_there() -> list[psutil.Process]:
            found = self.mains()
            return found if len(found) == self._count else []

        remedy = "`docker compose ps` shows what does not run"
        try:
            self._started = wait_for(f"{self.name} to be started by Docker", all_there, timeout_s=START_TIMEOUT_S)
        except TimeoutError as error:
            raise Failure(str(error), remedy, code="process-not-ready") from None

        def ready_and_alive() -> bool:
            self.require_running()
            return all(ports.answers(url, self._login) for url in self._urls)

        wait_for(f"{self.name} to be ready", ready_and_alive, timeout_s=START_TIMEOUT_S)

    def stop(self) -> None:
        """End it gently. Docker starts it again."""
        self._end(signal.SIGTERM)

    def pause_children(self) -> None:
        for main in self.mains():
            for process in _descendants(main):
                send(process, signal.SIGSTOP)

    def pid(self) -> int | None:
        return next((main.pid for main in self.mains()), None)

    def is_running(self) -> bool:
        """Whether it runs. A process that Docker has started again counts once ``start`` has seen it."""
        return len(self._started) == self._count and all(map(lives, self._started))

    def require_running(self) -> None:
        if not self.is_running():
            raise Failure(f"{self.name} has ended", f"see `docker compose logs {self.name}`", code="process-ended")

    def mains(self) -> list[psutil.Process]:
        """The main process of each container, as far as it runs."""
        return [process for process in self._find() if lives(process) and self._is_main(_command(process))]

    def processes(self) -> list[psutil.Process]:
        """The processes of the container, with all their descendants."""
        return [process for main in self.mains() for process in (main, *_descendants(main))]

    # ----------------------------------------------------------------------------------------------------------------

    def _end(self, with_signal: signal.Signals) -> None:
        mains, family = self.mains(), self.processes()
        for process in family if with_signal == signal.SIGKILL else mains:
            send(process, with_signal)
        for process in family:  # a frozen process does not react to a gentle signal
            send(process, signal.SIGCONT)
        wait_for(f"{self.name} to end", lambda: not any(map(lives, family)), timeout_s=END_TIMEOUT_S)


class Service:
    """The service, in a container of its own that the walkthrough does not break."""

    def __init__(self, url: str) -> None:
        self._url = url

    def start(self) -> None:
        wait_for("serve to be ready", lambda: ports.answers(self._url), timeout_s=START_TIMEOUT_S)

    def require_running(self) -> None:
        """Nothing to ask: requests are repeated for a while, and then fail by themselves."""


class Containers(Chain):
    """The containers beside this one. They run already, with data that stays."""

    service: Service
    worker: Container
    sinks: Container

    def __init__(self, settings: Settings, sinks: Sequence[str], shared: Path, find: Find = psutil.process_iter):
        """``shared`` is the folder with the file of the mode.

        Raises Failure if that folder is missing: these are not the containers of docker-compose, and the processes here
        may belong to others. Raises Failure too if another walkthrough runs: each would report the faults of the other.
        """
        if not shared.is_dir():
            raise Failure(
                f"there is no folder {shared}",
                "run it by `docker compose run --build --rm demo`",
                code="not-in-a-container",
            )
        self._lock = os.open(shared, os.O_RDONLY)  # held as long as this process lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Failure("another walkthrough runs", "wait until it has ended", code="walkthrough-running") from None
        self._configured = self._settings = settings
        self._effective: bool | None = settings.exactly_once  # None: unknown until the worker has started again
        self._mode_file = shared / MODE_FILE
        hosts = SINK_HOSTS[: len(sinks)]
        self.service = Service(f"{settings.service_url}/readyz")
        self.worker = Container(
            "connect",
            settings,
            find,
            count=1,
            owns=lambda command: WORKER_CLASS in command,
            urls=[f"{settings.connect_url}/connectors"],
            login=settings.connect_login,
        )
        self._sink_urls = [f"http://{host}:{SINK_PORT}" for host in hosts]
        health = [f"{url}{metrics.HEALTH}" for url in self._sink_urls]
        self.sinks = Container("sink", settings, find, count=len(sinks), owns=_runs_one_of(sinks), urls=health)

    @property
    def settings(self) -> Settings:
        return self._settings

    def sink_urls(self) -> list[str]:
        return self._sink_urls

    def start(self, report: Progress) -> None:
        for part in (self.worker, self.sinks):
            part.resume()  # a walkthrough that was killed may have left it frozen
            part.start()
        self.service.start()
        report(f"connector: {lifecycle.status(self.settings).mode}")
        report(f"service on {self.settings.service_url}")

    def request(self, *, exactly_once: bool) -> None:
        """Write the file of the mode: whole or not at all, because the worker may start at any time."""
        self._settings = self._configured.replace(exactly_once=exactly_once)
        self._effective = None
        staging = self._mode_file.with_suffix(".new")
        staging.write_text(f"{os.getpid()} {str(exactly_once).lower()}\n")
        staging.chmod(0o644)  # the worker runs as another user
        staging.replace(self._mode_file)

    def start_worker(self, report: Progress) -> None:
        self.worker.start()
        lifecycle.apply(self.settings)
        self._effective = self.settings.exactly_once
        report(f"{self.worker.name}: ready")

    def switch(self, *, exactly_once: bool, report: Progress) -> None:
        report(f"{self.worker.name}: switching exactly-once {'on' if exactly_once else 'off'}")
        self.request(exactly_once=exactly_once)
        self._restart_worker(report)

    def restore(self, report: Progress) -> None:
        for part in (self.worker, self.sinks):
            part.resume()
        if not self._mode_file.exists():
            return
        self._mode_file.unlink()
        if self._effective != self._configured.exactly_once:
            report(f"{self.worker.name}: restarting it as configured")
            self._settings = self._configured
            self._restart_worker(report)

    def _restart_worker(self, report: Progress) -> None:
        if not self.settings.exactly_once:
            lifecycle.disable_exactly_once(self.settings)  # a connector that requires it would fail on that worker
        self.worker.stop()
        self.start_worker(report)


def _runs_one_of(sinks: Sequence[str]) -> Callable[[Sequence[str]], bool]:
    """Recognise ``python -m outbox sink NAME…``. Without names it runs the sinks of the project."""

    def owns(command: Sequence[str]) -> bool:
        if list(command[1:4]) != ["-m", "outbox", "sink"]:
            return False
        names = command[4:] or project.current().sinks
        return bool({*names} & {*sinks})

    return owns


def _command(process: psutil.Process) -> Sequence[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return process.children(recursive=True)
    return []


# python -m outbox_lab.walkthrough.containers: what docker-compose runs as the service sink-naive.


def main() -> None:
    """Become the naive sink of the workload. Without one, wait: Docker would start again what has ended."""
    try:
        name = workload.load(seed=0).naive
        is_known = name in discovery.sinks(load())
    except Failure as failure:
        sys.exit(f"outbox: {failure}")
    if name is not None and is_known:
        os.execvp(sys.executable, ["python", "-m", "outbox", "sink", name])  # noqa: S606
    print("the workload names no naive sink: there is nothing to run", flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main()
