"""The `outbox` command: help, exit status, and how a failure is told."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner

from outbox import cli
from outbox.base import log
from outbox.base.settings import load
from outbox.cli import GROUPS, commands
from outbox.commands import COMMANDS
from outbox_lab.stack.internals import Internals
from outbox_lab.testing.command import environment, outbox
from tests.support.echo import create_app
from tests.support.paths import ROOT


def test_help_lists_every_command_in_its_group() -> None:
    done = CliRunner().invoke(cli.outbox, ["--help"])
    assert done.exit_code == 0, done.stderr
    listed: dict[str, str] = {}
    group = ""
    for line in done.stdout.splitlines():
        if line.rstrip(":") in GROUPS:
            group = line.rstrip(":")
        elif group and line.startswith("  ") and line[2] != " ":
            listed[line.split()[0]] = group
    assert listed == {name: entry.group for name, entry in commands().items()}


def test_the_commands_of_the_lab_are_there_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"demo", "soak", "up"} <= commands().keys() - COMMANDS.keys()
    assert commands().keys() > COMMANDS.keys()
    monkeypatch.setitem(sys.modules, "outbox_lab", None)  # as in an image
    assert commands() == COMMANDS


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["status"], {}, "not ready: postgres, kafka, connect"),
        (["status"], {"OUTBOX_SOURCE_DB_URL": "http://db"}, "wrong settings: OUTBOX_SOURCE_DB_URL"),
        # Nobody listens on port 1.
        (["connect", "apply"], {"OUTBOX_SOURCE_DB_URL": "postgresql://127.0.0.1:1"}, "127.0.0.1:1 as stock_source_cdc"),
    ],
)
def test_a_failure_is_status_1_and_one_line(
    arguments: list[str], variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = outbox(*arguments, home=tmp_path, **variables)
    assert done.returncode == 1, done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("outbox: ")
    assert said in line
    assert " — " in line  # the remedy


@pytest.mark.parametrize(
    ("arguments", "variable", "value"),
    [
        (["migrate"], "OUTBOX_SOURCE_DB_URL", "postgresql://127.0.0.1:1/stock_source?sslmode=prefer"),
        (["connect", "status"], "OUTBOX_CONNECT_URL", "http://127.0.0.1:1"),
    ],
)
def test_up_is_the_remedy_only_for_the_embedded_stack(
    arguments: list[str], variable: str, value: str, tmp_path: Path
) -> None:
    elsewhere = outbox(*arguments, home=tmp_path, **{variable: value})
    assert f"correct {variable}" in elsewhere.stderr
    assert "outbox up" not in elsewhere.stderr
    (tmp_path / "stack.env").write_text(f"{variable}={value}\n")
    assert outbox(*arguments, home=tmp_path).stderr.endswith("`outbox up` starts the embedded one\n")


def test_data_of_another_version_of_postgres_stays(tmp_path: Path) -> None:
    Internals().write(tmp_path)
    (tmp_path / "stack.env").touch()
    done = outbox("up", "--postgres", "15", home=tmp_path)
    assert done.returncode == 2
    assert "`outbox reset`" in done.stderr


def test_a_refused_confirmation_ends_it_and_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    done = outbox("reset", home=tmp_path)  # no terminal to ask on
    assert done.returncode == 130, done.stderr
    assert (tmp_path / "precious").exists()


def in_shell(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line with a home."""
    return subprocess.run(
        ["/bin/sh", "-c", command], env=environment(home), cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_package_that_is_not_installed_is_reported(tmp_path: Path) -> None:
    program = "import sys; sys.modules['psutil'] = None; sys.argv[1:] = ['status']; from outbox import cli; cli.main()"
    done = in_shell(f"'{sys.executable}' -c \"{program}\"", tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("outbox: this command needs the package of the module psutil")


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "kafka.log").write_text("a long line\n" * 5000)
    done = in_shell(f"'{sys.executable}' -m outbox logs kafka -n 5000 | head -n 1", tmp_path)
    assert (done.stdout, done.stderr) == ("a long line\n", "")


# Foreign text that is printed controls no terminal: a title, a clipboard, a line that looks like ours -------------


EVIL = "\x1b]0;title\x07\x9b2J\u202e"
SEEN = r"\x1b]0;title\x07\x9b2J\u202e"


def test_a_log_that_is_shown_controls_no_terminal(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "kafka.log").write_text(f"ä {EVIL}\tend\n")
    assert outbox("logs", "kafka", home=tmp_path).stdout == f"ä {SEEN}\tend\n"
    command = [sys.executable, "-m", "outbox", "logs", "--follow", "kafka"]
    with subprocess.Popen(command, env=environment(tmp_path), cwd=ROOT, stdout=subprocess.PIPE) as follower:
        try:
            assert follower.stdout is not None
            assert follower.stdout.readline().decode() == f"ä {SEEN}\tend\n"
        finally:
            follower.terminate()


def test_a_logged_path_controls_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
