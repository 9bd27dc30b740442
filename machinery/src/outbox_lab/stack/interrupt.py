"""The signals that end a command, and what it may still do then: whatever owns a stack stops it first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outbox.base.errors import Failure

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_heard = threading.Event()


def once() -> None:
    """Let the first of these signals raise KeyboardInterrupt, and the later ones do nothing (`never`).

    `timeout`, for example, sends SIGTERM to make and to us, and make sends it to us again. What is ignored already
    stays ignored, such as SIGHUP after nohup.
    """

    terminal = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def interrupt(number: int, *_: object) -> None:
        _heard.set()
        never()
        if number == signal.SIGHUP:  # the terminal is gone: what is written to it would raise an error
            nothing = os.open(os.devnull, os.O_WRONLY)
            for descriptor in terminal:
                os.dup2(nothing, descriptor)
        raise KeyboardInterrupt

    _handle(interrupt)


def never() -> None:
    """Let these signals do nothing from now on: they must not end what stops the stack."""
    _handle(lambda *_: None)  # a process that we start would inherit SIG_IGN, but not this


def _handle(handler: Callable[..., None]) -> None:
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


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
        raise Failure("the run was interrupted", code="interrupted")
