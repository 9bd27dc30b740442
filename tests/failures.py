"""Expected failures, by their stable codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.base.errors import Failure

if TYPE_CHECKING:
    from _pytest.raises import RaisesExc


def fails(code: str, *words: str) -> RaisesExc[Failure]:
    """Expect a Failure with this code. ``words`` are facts that its message must name, such as offsets or a sink."""
    return pytest.raises(
        Failure, check=lambda failure: failure.code == code and all(word in str(failure) for word in words)
    )
