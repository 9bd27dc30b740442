"""The signals that end a run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox.base.errors import Failure

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_heard = threading.Event()


def once() -> None:
    """Let the first of these signals raise KeyboardInterrupt, and the later ones do nothing: they must not end what
    stops the stack.

    `timeout`, for example, sends SIGTERM to make and to us, and make sends it to us again. What is ignored already
    stays ignored, such as SIGHUP after nohup.
    """
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def interrupt(*_: object) -> None:
        _heard.set()
        for one in heard:
            signal.signal(one, lambda *_: None)  # a process that we start would inherit SIG_IGN, but not this
        raise KeyboardInterrupt

    for number in heard:
        signal.signal(number, interrupt)


@contextmanager
def asked_to_end(end: Callable[[], None]) -> Iterator[None]:
    """Let the first Ctrl-C within the block call this, and only a second one end the run.

    The signal interrupts the main thread anywhere, so ``end`` may set a value, but not print.
    """
    usual = signal.getsignal(signal.SIGINT)

    def first(*_: object) -> None:
        signal.signal(signal.SIGINT, usual)
        end()

    if usual != signal.SIG_IGN:
        signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is first:
            signal.signal(signal.SIGINT, usual)


def require_none() -> None:
    """Raises Failure after such a signal: for the waits of other threads, to which a signal raises nothing."""
    if _heard.is_set():
        raise Failure("the run was interrupted", code="soak-interrupted")
