"""Foreign text that is printed controls no terminal: a title, a clipboard, a line that looks like ours."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from outbox.base import log, terminal
from outbox.base.settings import load
from outbox_lab.testing.command import environment, outbox
from tests.support.echo import create_app
from tests.support.paths import ROOT

EVIL = "\x1b]0;title\x07\x9b2J"
SEEN = r"\x1b]0;title\x07\x9b2J"


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A home whose Kafka has logged what somebody sent."""
    file = tmp_path / "logs" / "kafka.log"
    file.parent.mkdir()
    file.write_text(f"ä {EVIL}\tend\n")
    return tmp_path


def test_only_colours_pass() -> None:
    assert terminal.visible("\x1b[31mred\x1b[0m\tä\n") == "\x1b[31mred\x1b[0m\tä\n"
    assert terminal.visible("\x1b[2J\x1b[8m\r\u202e") == r"\x1b[2J\x1b[8m\r\u202e"


def test_log_of_a_part(logged: Path) -> None:
    assert outbox("logs", "kafka", home=logged).stdout == f"ä {SEEN}\tend\n"


def test_log_that_is_followed(logged: Path) -> None:
    command = [sys.executable, "-m", "outbox", "logs", "--follow", "kafka"]
    with subprocess.Popen(command, env=environment(logged), cwd=ROOT, stdout=subprocess.PIPE) as follower:
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline().decode() == f"ä {SEEN}\tend\n"
        finally:
            follower.terminate()


def test_path_of_a_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(tmp_path, environment=False, service_token="secret", log_format="text")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    log.configure(settings)
    try:
        sampled = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        create_app(settings).test_client().get("/%1b]0;title%07", headers=sampled)
    finally:
        structlog.reset_defaults()
    (line,) = capsys.readouterr().err.splitlines()
    assert r"/\x1b]0;title\x07" in line
