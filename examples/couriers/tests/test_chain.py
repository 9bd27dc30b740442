"""From the service to Cassandra, by the commands that run in production: killed, cut off, erased."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cassandra.cluster import NoHostAvailable
from outbox import Settings
from outbox_lab.testing import SinkRole, query, run, wait_for

from sinks import store
from sinks.couriers import target as couriers
from sinks.zones import target as zones
from tests.conftest import Node, Service

PLAIN = ("sink", "--plain", "--until-caught-up")
# Behind the function: the events are in Cassandra, and the sink database does not know of them.
DEATH = """

def write_and_die(events: pa.Table) -> None:
    write(events)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def dying(tmp_path: Path) -> Path:
    """This project, whose sink of couriers is killed once it has written a batch."""
    project = shutil.copytree(".", tmp_path / "project", ignore=shutil.ignore_patterns(".*", "tests"))
    folder = project / "sinks" / "couriers"
    job, target = folder / "job.py", folder / "target.py"
    job.write_text(job.read_text().replace("target:write", "target:write_and_die"))
    target.write_text(target.read_text().replace("import pyarrow", "import os\n\nimport pyarrow", 1) + DEATH)
    return project


@contextmanager
def started(chain: Settings, project: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `outbox` in a project, which does not outlive the block."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OUTBOX_")}
    with subprocess.Popen(
        [Path(sys.executable).with_name("outbox"), *words],
        cwd=project,
        env={**own, **chain.as_env(), "OUTBOX_HOME": str(chain.home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("tables")
def test_killed_between_write_and_commit_cut_off_and_erased(
    chain: Settings, service: Service, cassandra: Node, dying: Path
) -> None:
    for number in range(6):
        service.move("ada", f"zone-{number % 2}", number)
        service.move("bob", "north", number)
    run(chain, "check", "--wait", "60")

    with started(chain, dying, *PLAIN, "couriers") as killed:
        output, _ = killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL, output
    assert query(chain, "SELECT DISTINCT next_offset FROM positions", SinkRole.OWNER) == [(0,)]
    assert len(list(store.read("SELECT * FROM delivery.couriers"))) == 2, "it has written"
    run(chain, *PLAIN)
    run(chain, "check")

    service.move("ada", "north", 7)
    service.sign_off("bob")
    cassandra.kill()
    with started(chain, Path(), "sink", "--plain", "couriers", "zones") as cut_off:
        assert cut_off.stdout is not None
        said = next(line for line in cut_off.stdout if "target-failed" in line)
        assert json.loads(said)["sink"] in ("couriers", "zones"), said
        cassandra.start()
        wait_for("both sinks to go on", lambda: hold([("ada", 7, 7)]), timeout_s=120)
        cut_off.terminate()
        output, _ = cut_off.communicate(timeout=60)
    assert "Traceback" not in output
    run(chain, "check")

    store.session().execute("UPDATE delivery.couriers_by_zone SET parcels = 8 WHERE zone = 'north' AND courier = 'ada'")
    run(chain, "check", status=1)
    run(chain, "erase", "courier", "ada", "--yes")
    run(chain, "erase", "courier", "ada", "--check")
    run(chain, "rewind", "zones", "--to-earliest", "--yes")
    run(chain, *PLAIN)
    run(chain, "check")
    assert list(store.read("SELECT courier FROM delivery.couriers_by_zone")) == []


def hold(totals: list[tuple[str, int, int]]) -> bool:
    """Whether both tables answer, and hold this."""
    with suppress(NoHostAvailable):
        return [*couriers.totals()] == [*zones.totals()] == totals
    return False
