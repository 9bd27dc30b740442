"""Why a login failed: for good, or for now. A sink starts again after the second kind (`outbox.sink.retries`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from outbox.base import database
from outbox.base.settings import SinkRole, load

SERVER = 'connection to server at "127.0.0.1", port 15041 failed: FATAL:  '


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("could not write init file: No space left on device", "database-unavailable"),
        ("the database system is in recovery mode", "database-unavailable"),
        ('password authentication failed for user "x"', "database-login-refused"),
        ('role "x" does not exist', "database-login-refused"),
    ],
)
def test_a_login_that_fails_for_now_is_not_refused_for_good(tmp_path: Path, said: str, code: str) -> None:
    settings = load(tmp_path, environment=False)
    assert database._refusal(settings, SinkRole.WRITER, [SERVER + said])[2] == code
