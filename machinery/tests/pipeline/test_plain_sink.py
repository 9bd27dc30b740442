"""A sink in one process, without Spark: whatever stops it, and the change between both ways.

That it applies everything, stops in good order, and goes on after a lost connection is tested with Spark in
test_sink_stream.py and test_sink_recovery.py.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions
from packaging.requirements import Requirement

import outbox
from outbox.base.settings import Settings
from outbox.base.wait import timeout_scale, wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.sink.repair import rewind
from outbox_lab.testing.command import environment
from tests.support.made_events import nth_key, sums
from tests.support.paths import ROOT
from tests.support.sink_driver import Database
from tests.support.sink_process import (
    PLAIN,
    RANDOM,
    TIMEOUT_S,
    Publisher,
    catch_up,
    catch_up_plain,
    logged,
    reported_failure,
    running_plain,
    wait_applied,
)
from tests.support.topic_reader import topic_of

Run = Callable[..., CompletedProcess[str]]


def rows(done: CompletedProcess[str], sink: str) -> int:
    """How many events a sink has read in a run."""
    return sum(int(str(line["rows"])) for line in logged(done, "applied") if line["sink"] == sink)


def test_killed_again_and_again_it_applies_each_event_once(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    sent = publisher.events(0)
    for _ in range(6):
        with running_plain(topic, "dedup") as sink:
            some = publisher.events(300)
            sent += some
            for begin in range(0, 300, 30):
                publisher.send(some[begin : begin + 30])
            publisher.send(some[:20])
            wait_applied(sink, database, len(sent) - RANDOM.randrange(1, 300))
            sink.kill()  # while it reads, applies or commits
    done = catch_up_plain(topic, "dedup")
    assert done.returncode == 0, done.stderr
    assert database.totals() == sums(sent)
    assert database.applied() == len(sent)


def test_spark_and_plain_take_turns_at_the_same_positions(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    some = publisher.events(120)
    for begin, run in zip(range(0, 120, 30), [catch_up, catch_up_plain] * 2, strict=True):
        publisher.send(some[begin : begin + 30])
        done = run(topic, "dedup")
        assert (done.returncode, rows(done, "dedup")) == (0, 30), done.stderr
    assert database.totals() == sums(some)


def test_a_rewind_is_replayed_once(topic: Settings, publisher: Publisher, database: Database) -> None:
    some = publisher.events(60)
    publisher.send(some)
    assert catch_up_plain(topic, "dedup", "naive").returncode == 0
    for sink in ("dedup", "naive"):
        assert rewind.rewind(topic, sink, rewind.to_earliest(topic, sink)) > 0
    again = catch_up_plain(topic, "dedup", "naive")
    assert again.returncode == 0, again.stderr
    assert (rows(again, "dedup"), rows(again, "naive")) == (60, 60)
    assert database.totals() == sums(some)
    assert Database(topic, "naive").totals() == sums([*some, *some])
    assert logged(catch_up_plain(topic, "dedup"), "applied") == []
    assert logged(catch_up(topic, "dedup"), "applied") == [], "Spark does not replay it either"


def test_a_partition_that_is_new_is_read(topic: Settings, publisher: Publisher, database: Database) -> None:
    publisher.send(publisher.events(20))
    name = topic_of(topic)
    partitions = len(topics.last_stable_offsets(topic, name))
    with running_plain(topic, "dedup") as sink:
        wait_applied(sink, database, 20)
        admin = AdminClient(client_config(topic))
        admin.create_partitions([NewPartitions(name, partitions + 4)])[name].result(TIMEOUT_S)
        known = lambda: len(topics.last_stable_offsets(topic, name)) == partitions + 4  # noqa: E731
        wait_for("the broker to know them", known, timeout_s=TIMEOUT_S)
        Publisher(topic, continued=publisher).send(publisher.events(200, keys=50))
        wait_applied(sink, database, 220)
    assert len(database.positions()) == partitions + 4


def test_a_sink_that_needs_spark_says_so_and_the_others_run(
    topic: Settings, publisher: Publisher, database: Database
) -> None:
    publisher.send(publisher.events(20))
    done = catch_up_plain(topic, "dedup", "lakehouse")
    assert [line["code"] for line in logged(done, "sink cannot run")] == ["engine-wrong"]
    assert database.applied() == 20
    assert "run it without --plain" in reported_failure(catch_up_plain(topic, "lakehouse"))


@pytest.fixture(scope="module")
def lean(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs `outbox` where only the packages of the extra `plain` are installed."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "outbox").symlink_to(Path(outbox.__file__).parent)
    for name in distributions("outbox-machinery[plain]"):
        for part in {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
            (folder / part).symlink_to(Path(str(metadata.distribution(name).locate_file(part))))
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [one for one in sys.path if one.startswith(({str(folder)!r}, sys.base_prefix))]\n"
    )

    def run(settings: Settings, *words: str) -> CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "outbox", *words],
            cwd=ROOT,
            env=environment(settings.home, **settings.as_env(), PYTHONPATH=str(folder)),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S * timeout_scale(),
            check=False,
        )

    return run


def distributions(*wanted: str) -> set[str]:
    """The distributions that some requirements need, themselves included. Ours is not among them."""
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found, left = set[str](), [Requirement(one) for one in wanted]
    while left:
        one = left.pop()
        if one.name == ours["name"]:
            extras = [ours["dependencies"], *(ours["optional-dependencies"][extra] for extra in one.extras)]
            left += [Requirement(text) for texts in extras for text in texts]
        elif one.name.lower() not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(one.name.lower())
            left += map(Requirement, metadata.requires(one.name) or ())
    return found


def test_plain_sinks_and_handlers_need_the_packages_of_their_extra_alone(
    topic: Settings, publisher: Publisher, database: Database, lean: Run
) -> None:
    publisher.send(publisher.events(20))
    publisher.send_raw(nth_key(0), b"{", None)
    for words in (["sink", PLAIN, "dedup"], ["handle", "item_receipts"]):
        done = lean(topic, *words, "--until-caught-up")
        assert done.returncode == 0, done.stderr
    assert (database.applied(), len(database.dead_letters())) == (20, 1)
    assert database.query("SELECT count(*) FROM handled_events") == [(20,)]
    for command in (["sink", "dedup"], ["check"]):
        assert "install the extra" in reported_failure(lean(topic, *command))
