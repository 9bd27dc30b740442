"""Assert that a Failure is raised, by its stable code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox.base.errors import Failure


@contextmanager
def raises(code: str, *parts: str) -> Iterator[None]:
    """The block must raise a Failure of this code; its text must contain these parts, such as a name or a command."""
    with pytest.raises(Failure) as caught:
        yield
    assert caught.value.code == code, caught.value
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value
