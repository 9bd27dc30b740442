"""One operating system process with its children: start, stop, kill, pause, watch.

The process table is the truth: a process carries its name in its environment (``OUTBOX_PROCESS``), so that it is found
again by any later command, also when the one that started it was killed before it could write anything down.
"""

from __future__ import annotations

import os
import signal
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import PREFIX
from outbox.base.wait import wait_for

MARK = "OUTBOX_PROCESS"
KEPT = {"OUTBOX_TIMEOUT_SCALE", "OUTBOX_JVM_LOG_LEVEL", project.VARIABLE}


class Controller(ABC):
    """What can be done to a part, be it a process or a container: the interface that commands, tests and faults use."""

    name: str

    @abstractmethod
    def start(self) -> None:
        """Start it and return once it is ready to serve. Does nothing to a part that is ready already."""

    @abstractmethod
    def stop(self) -> None:
        """Ask it to end, and return once nothing of it is left."""

    @abstractmethod
    def kill(self) -> None:
        """End it as a crash would (SIGKILL), and return once nothing of it is left."""

    @abstractmethod
    def pause(self) -> None:
        """Freeze it (SIGSTOP): it keeps its connections and answers nothing."""

    @abstractmethod
    def resume(self) -> None:
        """Undo ``pause``."""

    @abstractmethod
    def is_running(self) -> bool:
        """Whether it lives, ready or not."""


class Process(Controller):
    """A controlled process of ours, told apart by its home folder and its name.

    A subclass says how to start (``argv``) and when it is ready (``is_ready``).
    """

    stop_signal = signal.SIGTERM
    stop_timeout_s = 30.0
    start_timeout_s = 60.0

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.home = home
        self.folder = home / name
        self.log_file = home / "logs" / f"{name}.log"
        self._mark = f"{home}:{name}"

    def argv(self) -> Sequence[str | Path]:
        """The command line."""
        raise NotImplementedError

    def env(self) -> Mapping[str, str]:
        """What to add to our own environment."""
        return {}

    def prepare(self) -> None:
        """Make what must be there before a start. May be cut off at any point and run again."""

    def is_ready(self) -> bool:
        """Whether it serves. Called again and again while it starts."""
        return True

    # The interface ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        if not self.is_running():
            self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        """Start it and do not wait. What a crash left of it, children without their parent, is ended first."""
        if self.processes():
            self.kill()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.prepare()
        with self.log_file.open("ab") as log:
            child = subprocess.Popen(
                [str(word) for word in self.argv()],
                env=self._marked_env(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child.returncode = 0  # let go of it: it outlives us, and is found by its mark, not by this handle

    def wait_ready(self) -> None:
        """Wait until it serves. Raises Failure with the end of its log if it died or took too long."""

        def ready_or_dead() -> bool:
            if not self.is_running():
                raise Failure(f"{self.name} ended while it was starting; the end of {self.log_file}:\n{self.tail()}")
            return self.is_ready()

        try:
            wait_for(f"{self.name} to be ready", ready_or_dead, timeout_s=self.start_timeout_s)
        except TimeoutError as error:
            raise Failure(f"{error}; the end of {self.log_file}:\n{self.tail()}") from None

    def stop(self) -> None:
        # Children whose parent crashed have nothing left to end in order.
        self._end(self.stop_signal if self.is_running() else signal.SIGKILL)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        for process in self.processes():
            _send(process, signal.SIGSTOP)

    def resume(self) -> None:
        for process in self.processes():
            _send(process, signal.SIGCONT)

    def is_running(self) -> bool:
        return self.pid() is not None

    # Looking ------------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every living process of this part, the oldest first."""
        return sorted((p for p in psutil.process_iter() if self.owns(p)), key=_age)

    def owns(self, process: psutil.Process) -> bool:
        """Whether a living process belongs to this part."""
        try:
            return environment(process).get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def pid(self) -> int | None:
        """The main process, if it lives: the one that leads its session; children may outlive it for a moment."""
        for process in self.processes():
            with suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) == process.pid and environment(process).get(MARK) == self._mark:
                    return process.pid
        return None

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        if not self.log_file.exists():
            return "(no log)"
        with self.log_file.open("rb") as log:
            log.seek(max(0, self.log_file.stat().st_size - 64 * 1024))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    # ----------------------------------------------------------------------------------------------------------------

    def _run(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """Run a program of the preparation, marked, so that it is found and ended if we are killed meanwhile."""
        return subprocess.run(
            argv, env=self._marked_env(), cwd=self.folder, capture_output=True, text=True, check=False
        )

    def _marked_env(self) -> Mapping[str, str]:
        # Its settings come from us alone, not from whatever this shell has besides.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in KEPT}
        return {**inherited, **self.env(), MARK: self._mark}

    def _end(self, with_signal: signal.Signals) -> None:
        found = self.processes()
        # A gentle signal goes to the main process, which ends its children; a crash takes them all.
        for process in found if with_signal == signal.SIGKILL else found[:1]:
            _send(process, with_signal)
        for process in found:  # paused, they would not hear it, nor end what it tells them to
            _send(process, signal.SIGCONT)

        def ended() -> bool:
            # A process that is ending loses its environment, and so our mark, before it lets go of its ports.
            return not any(map(_lives, found)) and not self.processes()

        try:
            wait_for(f"{self.name} to end", ended, timeout_s=self.stop_timeout_s)
        except TimeoutError:
            if with_signal == signal.SIGKILL:
                raise
            self.kill()


def environment(process: psutil.Process) -> Mapping[str, str]:
    """Its environment. One that is just replacing its program has neither that nor a command line: look again."""

    def environ() -> tuple[Mapping[str, str]] | None:  # a tuple, as an empty one counts as false
        found = process.environ()
        if found:
            return (found,)
        has_none = process.cmdline() or not process.exe()  # nothing but the kernel runs without a program
        return (process.environ(),) if has_none else None  # read again, as it may have come by it in between

    with suppress(TimeoutError):
        return wait_for(f"process {process.pid} to have its program", environ, timeout_s=1, poll_s=0.001)[0]
    return {}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, with_signal: signal.Signals) -> None:
    try:
        process.send_signal(with_signal)
    except psutil.NoSuchProcess:
        return


def _age(process: psutil.Process) -> tuple[float, int]:
    try:
        return process.create_time(), process.pid
    except psutil.Error:
        return float("inf"), process.pid
