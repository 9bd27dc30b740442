"""Wait for a condition with a deadline, and say what was waited for; calls in threads that nothing waits for."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from outbox.base.errors import Failure

T = TypeVar("T")
SCALE_VARIABLE = "OUTBOX_TIMEOUT_SCALE"


class WaitTimeoutError(Failure, TimeoutError):
    """A condition did not come true before its deadline."""


def timeout_scale() -> float:
    """The one multiplier of every deadline, for slow machines: environment variable ``OUTBOX_TIMEOUT_SCALE``.

    Raises Failure if it is not a positive number.
    """
    given = os.environ.get(SCALE_VARIABLE) or "1"
    try:
        scale = float(given)
    except ValueError:
        scale = math.nan
    if not 0 < scale < math.inf:
        raise Failure(
            f"wrong settings: {SCALE_VARIABLE}: {given} is not a positive number",
            "correct the variable",
            code="settings-wrong",
        )
    return scale


def nothing() -> None:
    pass


def wait_for(
    what: str,
    condition: Callable[[], T | None],
    *,
    timeout_s: float,
    poll_s: float = 0.05,
    needs: Callable[[], None] = nothing,
) -> T:
    """Call ``condition`` until it returns something true, and return that.

    An exception of ``condition`` ends the wait at once: a condition answers "not yet" with a false value. ``needs`` is
    called after each such answer. It raises if the condition cannot become true any more, as when a process has ended.
    Raises WaitTimeoutError naming ``what`` and the last answer once ``timeout_s`` (scaled) has passed.
    """
    limit_s = timeout_s * timeout_scale()
    deadline = time.monotonic() + limit_s
    while True:
        answer = condition()
        if answer:
            return answer
        needs()
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(f"waited {limit_s:.0f} s for {what}; the last answer was {answer!r}", code="timeout")
        time.sleep(poll_s)


def in_thread(name: str, function: Callable[..., T], *given: object) -> Future[T]:
    """A call in a thread of its own. It does not keep the process from its end: a function may never return."""
    future = Future[T]()
    future.set_running_or_notify_cancel()

    def call() -> None:
        try:
            future.set_result(function(*given))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, name=name, daemon=True).start()
    return future
