"""An entry of the runbook, followed word by word on a chain that is really broken."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path

from outbox.audit import check
from outbox.audit.doctor import examine
from outbox.audit.report import Report
from outbox.base.settings import Settings
from outbox.base.wait import wait_for
from outbox_lab.stack.postgres import Postgres
from outbox_lab.testing.command import outbox
from tests.stock import Client
from tests.support import runbook
from tests.support.made_events import nth_key
from tests.support.runbook import Entry
from tests.support.sink_process import catch_up, logged, running_warm
from tests.support.topic_reader import relayed

SINK = "dedup"
TIMEOUT_S = 120
DIAGNOSIS_TIMEOUT_S = 30
IDLE = {"sink-not-running"}
ASKS = {("connect", "remove"), ("rewind",), ("rebuild",)}


@dataclass
class Rehearsal:
    """One entry, and the chain that it repairs."""

    settings: Settings
    client: Client
    title: str
    ran: list[str] = field(default_factory=list)

    @property
    def entry(self) -> Entry:
        return runbook.entry(self.title)

    def move(self, *quantities: int) -> None:
        """Requests to the service, each of which writes an event."""
        for quantity in quantities:
            item, key = nth_key(abs(quantity) % 3), str(uuid.uuid4())

            def answer(item: str = item, quantity: int = quantity, key: str = key) -> int | None:
                """The answer: the request is repeated with its key while the database is unavailable."""
                status = self.client.move(item, quantity, key=key).status_code
                return None if status == HTTPStatus.SERVICE_UNAVAILABLE else status

            assert wait_for("the service to answer", answer, timeout_s=30, poll_s=0.2) == HTTPStatus.CREATED

    def working(self, *quantities: int) -> None:
        """Move quantities, relay and apply them: everything works."""
        self.move(*quantities)
        relayed(self.settings)
        done = catch_up(self.settings, SINK)
        assert done.returncode == 0, done.stderr

    def diagnosed(self, *codes: str) -> None:
        """`outbox doctor` finds what the entry says, or these codes of it, and nothing else.

        The sink runs only when the entry says so: that it does not is no part of the damage.
        """
        expected = set(codes or self.entry.codes) - IDLE
        assert expected <= set(self.entry.codes)
        latest: list[set[str]] = []

        def agrees() -> bool:
            latest[:] = [{one.code for one in examine(self.settings) if not one.is_ok} - IDLE]
            return latest[0] == expected

        try:
            wait_for("doctor to find what the page says", agrees, timeout_s=DIAGNOSIS_TIMEOUT_S, poll_s=0.5)
        except TimeoutError as error:
            raise AssertionError(f"doctor finds {latest[0]}, the page says {expected}") from error

    def follow(self, commands: slice = slice(None)) -> None:
        """Run the commands of the entry, in its order. Each must end with status 0."""
        chosen = self.entry.commands[commands]
        assert chosen, f"{self.title} has no commands"
        for words in chosen:
            self.run(*(SINK if word == "NAME" else word for word in words))

    def run(self, *words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Run one command as an operator would; `outbox sink` until it has caught up."""
        if words[0] == "sink":
            done = catch_up(self.settings, *words[1:])
        else:
            asks = any(words[: len(asked)] == asked for asked in ASKS)
            sure = ["--yes"] if asks and "--dry-run" not in words else []
            done = outbox(*words, *sure, home=self.settings.home, **self.settings.as_env())
        self.ran.append(" ".join(words))
        assert done.returncode == status, f"outbox {' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def checked(self) -> Report:
        """`outbox check` after a sink that has caught up. None runs: a stop during its start would end the JVM."""
        return check.check_settled(self.settings, TIMEOUT_S)

    def sound(self, *quantities: int) -> None:
        """The checkers are green, and new work is applied too."""
        with running_warm(self.settings, SINK) as sink:
            for moved in ((), quantities or (7, 8)):
                self.move(*moved)
                report = check.check_settled(self.settings, TIMEOUT_S, needs=sink.require_running)
                assert [str(one) for one in report.findings] == []


Rehearse = Callable[[str], Rehearsal]  # the rehearsal of an entry, by its title


def run_client(postgres: Postgres, settings: Settings, program: str, *words: str | Path, given: str = "") -> str:
    """Run a client program of Postgres as the superuser, and return what it printed."""
    environment = {
        "PGHOST": postgres.psql_host,
        "PGPORT": str(postgres.port),
        "PGUSER": "postgres",
        "PGPASSWORD": postgres.password,
    }
    argv = [str(word) for word in (postgres.program(program), *words)]
    done = subprocess.run(argv, env=environment, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def failure_codes(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The codes of the failures that the log of a sink names."""
    return [str(line["code"]) for line in logged(done, "sink failed")]
