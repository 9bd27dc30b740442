"""Expected failures, told apart by their codes: the wording of a message may change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox.base.errors import Failure


@contextmanager
def failing(code: str) -> Iterator[pytest.ExceptionInfo[Failure]]:
    """The block raises a Failure of this code."""
    with pytest.raises(Failure) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
