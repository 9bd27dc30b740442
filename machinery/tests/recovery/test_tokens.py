"""The whole chain with logins by token: short-lived ones, and a token server that is away for longer than they live."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import psutil
import pytest

from outbox.audit import doctor
from outbox.audit.check import check
from outbox.base.errors import Failure
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox.migrations.migrate import migrate
from outbox.relay import lifecycle
from outbox_lab.stack.command import SinkProcess
from outbox_lab.stack.connect import Connect
from outbox_lab.testing.homes import Homes
from tests.support.outbox_rows import ids, insert, row
from tests.support.secured import Secured, TokenServer, token_servers
from tests.support.sink_driver import Database

LIFETIME_S = 10
SINK, QUANTITY = "dedup", 5  # of a row, by default
AWAY = "token-server-unavailable"
Relaying = tuple[Secured, TokenServer, Connect]


@pytest.fixture
def relaying(homes: Homes) -> Iterator[Relaying]:
    """A chain that is migrated and relays."""
    with token_servers(homes.new("tokens")) as (secured, tokens, connect):
        tokens.lifetime_s = LIFETIME_S
        migrate(secured.settings)
        lifecycle.apply(secured.settings)
        yield secured, tokens, connect


@pytest.mark.recovery
def test_chain_outlives_its_tokens_and_a_token_server_that_is_away(relaying: Relaying) -> None:
    secured, tokens, connect = relaying
    settings = secured.settings
    sink = SinkProcess("sink", settings, ["sink", SINK])
    sink.start()
    try:
        applied = 0
        for issued in (12, 24):  # clients of the broker, of the worker and of the sink ask again and again
            wait_for("other tokens", partial(lambda count: len(tokens.issued) > count, issued), timeout_s=90)
            applied += follow(settings)
        assert "sink failed" not in sink.log_file.read_text()

        tokens.stop()
        insert(settings, row(), row())
        wait_for("the sink to say so", lambda: AWAY in sink.log_file.read_text(), timeout_s=120)
        assert [one.code for one in doctor.examine(settings, "kafka")] == [AWAY]
        insert(settings, row())
        tokens.start()
        wait_for("all events", lambda: mended(settings, connect, applied + 3), timeout_s=150)
        follow(settings)
        said = sink.log_file.read_text()
        logs = [said, *(file.read_text() for file in (settings.home.parent / "logs").glob("*.log"))]
        arguments = [*command_lines(sink)]
        assert any("java" in line for line in arguments)
        assert not [text for secret in secured.secrets() for text in (*logs, *arguments) if secret in text]
    finally:
        sink.stop()
    assert sorted(Database(settings).totals().values()) == [QUANTITY] * len(ids(settings)), "each once"
    report = check(settings)
    codes = {finding.code for finding in report.findings} - {"sink-drift"}  # rows of events without those of a service
    assert (codes, report.settled) == (set(), True)


def command_lines(sink: SinkProcess) -> Iterator[str]:
    """The command lines of the sink and of its descendants that run now."""
    for process in sink.processes():
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.Error):  # it has just ended
                yield " ".join(one.cmdline())


def mended(settings: Settings, connect: Connect, events: int) -> bool:
    """Whether so many events are applied. A worker that has ended is started again, as its supervisor does, and a task
    that has failed is restarted, as `outbox monitor` does.
    """
    if not connect.processes():
        connect.start()
    with suppress(Failure):  # the worker joins its group
        if lifecycle.status(settings).error:
            lifecycle.apply(settings)
    return Database(settings).applied() == events


def follow(settings: Settings) -> int:
    """Write two events, and wait until the sink has applied all."""
    insert(settings, row(), row())
    wait_for("both", lambda: Database(settings).applied() == len(ids(settings)), timeout_s=60)
    return 2
