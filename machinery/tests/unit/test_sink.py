"""Sinks before they run: declarations of jobs and their refusals, the command, and identities of dead letters; files of
SQL: a typing mistake in a header or a section is reported, not ignored. And sinks that run: their metrics, with and
without a Kafka that answers, and the failures that they survive; the metrics of `outbox monitor`.
"""

from __future__ import annotations

import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg2
import pytest
import requests
from click.testing import CliRunner
from confluent_kafka import KafkaError, KafkaException
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import outbox
from outbox.audit import monitor
from outbox.audit.monitor import Monitor
from outbox.audit.report import ComparisonReport, Report, SinkReport, TopicReport
from outbox.base import project
from outbox.base.errors import Failure
from outbox.base.settings import DatabaseUrl, Settings, load
from outbox.commands.sink import sink
from outbox.sink import discovery
from outbox.sink.applying import projection
from outbox.sink.applying.function import FunctionTarget
from outbox.sink.applying.lakehouse.target import LakehouseTarget
from outbox.sink.applying.postgres.target import PostgresTarget
from outbox.sink.applying.projection import Projection
from outbox.sink.decoding import dead_records
from outbox.sink.decoding.records import Record
from outbox.sink.remembering import strategy
from outbox.sink.remembering.strategy import Strategy
from outbox.sink.running import supervisor
from outbox.sink.running.metrics import Metrics, State, ask_lag, served
from outbox.sink.running.supervisor import FAILURES_MAX, MAX_DELAY_S, WITHIN_S, Retries
from outbox.sink.spec import SinkJob, SinkSpec
from outbox.sinks import IcebergTarget
from outbox_lab.stack import ports
from outbox_lab.testing.failures import raises
from tests import targets
from tests.support import made_events
from tests.support.declared import Events, payload
from tests.support.declared_sinks import decoders

EVENT_ID = "01a1fc75-167d-7239-af57-d1ee1a62e0a6"
PACKAGE = "sinks_of_a_test"
IMPORTS = "from pathlib import Path\nfrom outbox.sinks import IcebergTarget, LakehouseTarget, SinkJob\n"
FUNCTION = "tests.targets:write"


def resolve(job: SinkJob = made_events.JOB, **changes: Any) -> SinkSpec:
    return discovery.resolve(load(environment=False), replace(job, **changes))


Declare = Callable[[str], list[SinkJob]]


class TestCommand:
    """`outbox sink`: which sinks it runs."""

    @pytest.mark.parametrize(
        ("of_project", "words", "ran", "code"),
        [
            ("upsert dedup", "", "upsert dedup", ""),
            ("upsert dedup", "merge naive merge", "merge naive", ""),
            ("upsert dedup", "bad dedup", "dedup not-bad", ""),
            ("upsert dedup", "bad", "", "event-undeclared"),
            ("dedup nonsense", "", "", "sink-unknown"),
            ("", "", "", "failed"),
        ],
    )
    def test_it_runs_the_given_ones_or_those_of_the_project_that_can_run(
        self, monkeypatch: pytest.MonkeyPatch, of_project: str, words: str, ran: str, code: str
    ) -> None:
        names: list[str] = []

        def run(_: Settings, specs: Sequence[SinkSpec], unusable: Mapping[str, Failure], **__: bool) -> None:
            names.extend([*(one.name for one in specs), *(f"not-{name}" for name in unusable)])

        mine = replace(project.current(), sinks=tuple(of_project.split()))
        bad = replace(made_events.JOB, name="bad", events=["order.lost"])
        known = discovery.jobs(load(environment=False))
        monkeypatch.setattr(supervisor, "run", run)
        monkeypatch.setattr(project, "current", lambda: mine)
        monkeypatch.setattr(discovery, "jobs", lambda _: [bad, *known])
        with raises(code) if code else nullcontext():
            CliRunner().invoke(sink, words.split(), catch_exceptions=False)
        assert names == ran.split()


class TestJobs:
    """Declarations that a job may have."""

    @pytest.mark.parametrize(
        ("changes", "code", "part"),
        [
            *(({"name": name}, "sink-unusable", "not a word") for name in ("", "Stock", "a.rebuild", "a" * 41, "a\n")),
            ({"events": []}, "sink-unusable", "it takes no events"),
            ({"decoders": made_events.MAIN.decoders}, "sink-unusable", "it takes no events"),
            ({"events": "order"}, "sink-unusable", "events=['order']"),
            ({"events": ["item", "order.placed.v1.v1"]}, "event-undeclared", "order.placed.v1.v1"),
            ({"strategy": "best"}, "strategy-unusable", "best"),
            ({"strategy": Path("missing.sql")}, "strategy-unusable", "missing.sql"),
            ({"target": "tests.targets.write"}, "sink-unusable", "tests.targets.write"),
            ({"target": targets.write}, "sink-unusable", "package.module:function"),
            ({"target": FunctionTarget}, "sink-unusable", "package.module:function"),
            ({"transform": targets.write}, "sink-unusable", "package.module:function"),
            # The function of a target is looked for before the start.
            ({"target": FUNCTION, "projections": Path("none"), "strategy": "merge"}, "sink-unusable", "merge"),
            ({"target": "tests.missing:write", "projections": Path("none")}, "sink-unusable", "tests.missing"),
            ({"target": FUNCTION}, "sink-unusable", ".sql"),
        ],
    )
    def test_a_declaration_that_cannot_be_used_is_refused(self, changes: dict[str, Any], code: str, part: str) -> None:
        with raises(code, part):
            spec = resolve(**changes)
            spec.target.require_usable(spec)

    def test_a_function_without_pyarrow_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = resolve(target=FUNCTION, projections=Path("none"))
        spec.target.require_usable(spec)
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with raises("package-missing", "pyarrow"):
            spec.target.require_usable(spec)

    @pytest.mark.parametrize("by", ["upsert", "versions"])
    def test_strategies_that_need_versions_refuse_events_without(self, tmp_path: Path, by: str) -> None:
        known = Events(tmp_path).aggregate("order", 'key = "id"\n', placed_v1=payload()).load()
        with raises("sink-unusable", by, "numbered by key"):
            resolve(events=[], decoders=decoders(known, "order"), strategy=by)

    def test_two_jobs_of_one_name_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(discovery, "jobs", lambda _: [made_events.JOB, replace(made_events.JOB, events=["order"])])
        with raises("sink-unusable", made_events.JOB.name):
            discovery.sinks(load(environment=False))


class TestModules:
    """The module ``job`` of a subpackage: the defaults that it gives, and what it must declare."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The subpackage `orders` of a project's sinks."""
        return tmp_path / PACKAGE / "orders"

    @pytest.fixture
    def declare(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
        """The jobs of the project whose only module ``job`` has these lines."""
        mine = replace(project.current(), sinks_package=PACKAGE, handlers="handlers_of_a_test")
        monkeypatch.setattr(project, "current", lambda: mine)
        monkeypatch.syspath_prepend(tmp_path)
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()

        def jobs(lines: str) -> list[SinkJob]:
            (folder / "job.py").write_text(IMPORTS + lines)
            return discovery.jobs(load(environment=False))

        yield jobs
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]

    def test_a_job_that_names_its_events_only_gets_the_rest_of_its_subpackage(
        self, declare: Declare, folder: Path
    ) -> None:
        (job,) = declare('job = SinkJob(events=["order"])')
        assert (job.name, job.projections, job.strategy) == ("orders", folder / "projections", "dedup")
        assert isinstance(resolve(job).target, PostgresTarget)

    @pytest.mark.parametrize("kind", [LakehouseTarget, IcebergTarget])
    def test_what_a_job_names_stays_and_its_paths_begin_at_the_subpackage(
        self, declare: Declare, folder: Path, kind: type[LakehouseTarget]
    ) -> None:
        (job,) = declare(
            'job = SinkJob(name="mine", events=["order"], strategy=Path("mine.sql"), projections=Path("../others"), '
            f'target={kind.__name__}(schema=Path("table.sql"), totals=Path("totals.sql")))'
        )
        assert (job.name, job.strategy, job.projections) == ("mine", folder / "mine.sql", folder.parent / "others")
        assert type(job.target) is kind
        assert vars(job.target) == vars(kind(schema=folder / "table.sql", totals=folder / "totals.sql"))

    @pytest.mark.parametrize(
        ("lines", "names"),
        [
            ("jobs = [first, first.by('merge')]", ["first", "first-merge"]),
            ("def jobs(settings): return (first,)", ["first"]),
            ("jobs = []", []),
            *((lines, None) for lines in ("", 'job = ["order"]', "jobs = first", "def jobs(settings): pass")),
            *((lines, None) for lines in ('jobs = ["order"]', "job = first\njobs = [job]")),
        ],
    )
    def test_several_jobs_or_none_are_a_list_or_what_a_function_returns(
        self, declare: Declare, lines: str, names: list[str] | None
    ) -> None:
        first = 'first = SinkJob(name="first", events=["order"])\n'
        if names is None:
            with raises("sink-unusable", f"{PACKAGE}.orders.job"):
                declare(first + lines)
        else:
            assert [job.name for job in declare(first + lines)] == names


RECORD = Record(key=b"k", headers=[("a", b"1"), ("b", None)], value=b"v", recorded_ms=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"key": None},
        {"key": b"kv", "value": b""},
        {"value": None},
        {"headers": [("a", b"1"), ("b", b"")]},
        {"headers": [("a1", b""), ("b", None)]},
    ],
)
def test_the_identity_of_a_dead_letter_differs_where_anything_differs(changes: dict[str, Any]) -> None:
    assert dead_records.identity(RECORD, EVENT_ID) == EVENT_ID
    same = dead_records.identity(RECORD, None)
    assert dead_records.identity(RECORD._replace(recorded_ms=1), None) == same
    assert dead_records.identity(RECORD._replace(**changes), None) != same


# Strategies and projections as files, and the SQL of the machinery ----------------------------------------------------


IDS = "INSERT INTO ids SELECT FROM batch, dedup_horizon"
SOURCES = Path(outbox.__file__).parent
MADE = re.compile(r"\bCREATE (?:TABLE|VIEW|FUNCTION) (?:public\.)?(\w+)")


def projection_of(folder: Path, text: str) -> Projection:
    (folder / "mine.sql").write_text(text)
    (found,) = projection.load(folder, "events")
    return found


def strategy_of(folder: Path, text: str) -> Strategy:
    (folder / "mine.sql").write_text(text)
    return strategy.load(folder)["mine"]


@pytest.mark.parametrize("begin", ["", "\n \n", "-- of /* some\n", "/* a\n\n comment */\n-- and another\n"])
@pytest.mark.parametrize("blanks", ["", "\t ", "\r"])
def test_comments_before_a_section_and_blanks_behind_its_line_do_not_matter(
    tmp_path: Path, begin: str, blanks: str
) -> None:
    text = f"{begin}-- [refuse]{blanks}\n-- nothing [yet]\nSELECT 1;\n-- [apply]{blanks}\nSELECT 2;\n"
    found = projection_of(tmp_path, text)
    assert found.refuse is not None
    assert (found.refuse.splitlines()[-1], found.apply.strip()) == ("SELECT 1;", "SELECT 2;")
    assert projection_of(tmp_path, f"-- the events are\n--  Ordered{blanks}\nSELECT 1;").is_ordered
    assert not projection_of(tmp_path, "-- ordered by version\nSELECT 1;").is_ordered


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *(
            (text, "sql-section-unknown")
            for line in ("--[refuse]", " -- [refuse]", "-- [refuse", "-- [refuse] x", "-- []")
            for text in (f"{line}\nSELECT 1;\n-- [apply]\nSELECT 2;", f"{line}\nSELECT 1;")
        ),
        *(
            (f"{begin}-- [apply]\nSELECT 2;", "sql-section-unknown")
            for begin in ("SELECT 1;\n", "/* what\n-- it does */ SELECT 1;\n", "-- a comment\n\nSELECT 1\n;\n")
        ),
        *(
            (f"{line}\nSELECT 1;", "projection-unusable")
            for line in ("-- ordered: yes", "-- ordered:", "-- ordered = true")
        ),
    ],
)
def test_a_projection_that_says_what_nobody_understands_is_reported(tmp_path: Path, text: str, code: str) -> None:
    with raises(code, "mine.sql"):
        projection_of(tmp_path, text)


@pytest.mark.parametrize(
    ("line", "statements"),
    [
        *((f"-- memory: none\n-- {option}", "SELECT 1;") for option in ("takes: state", "knows: position", "takes:")),
        *((f"-- memory: none\n-- {option}", "SELECT 1;") for option in ("start: latest", "takes: States")),
        *((f"-- memory: {memory}", IDS) for memory in ("ids", "ids by time", "", "idz by event_id")),
        ("-- memory: ids by key version", "SELECT 1 -- ids"),
        ("-- memory: ids by event_id", "INSERT INTO ids SELECT FROM batch"),  # it would apply again
    ],
)
def test_a_header_that_cannot_be_is_reported(tmp_path: Path, line: str, statements: str) -> None:
    with raises("strategy-unusable", "mine.sql"):
        strategy_of(tmp_path, f"-- an idea\n{line}\n{statements}")


def test_each_statement_names_the_schema_of_our_tables() -> None:
    """A service may have a table ``outbox`` of its own, in a schema that comes first in its search path.

    A migration runs with the search path of its session.
    """
    migrations = sorted((SOURCES / "migrations").glob("*/*.py"))
    ours = {name for file in migrations for name in MADE.findall(file.read_text())}
    assert {"outbox", "idempotency_keys", "sinks", "dead_letters", "processed_events", "first_uuid_of"} <= ours
    names = "|".join(sorted(ours))
    unqualified = re.compile(
        rf"\b(?:FROM|JOIN|INTO|UPDATE|USING|TRUNCATE|TABLE|LIKE)\s+(?:{names})\b(?!\()|\bSELECT (?:{names})\("
        r"|\bON\s+(?:outbox|idempotency_keys)\b|'outbox', privilege"
    )
    wrong = {
        f"{file.relative_to(SOURCES)}: {found[0]}"
        for file in sorted(SOURCES.rglob("*"))
        if file.suffix in (".py", ".sql") and "migrations" not in file.parts
        for found in unqualified.finditer(file.read_text())
    }
    assert wrong == set()


# Sinks that run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a Kafka that is not running, and of a free port for the metrics."""
    kafka, port = ports.choose(0, 0)
    return load(tmp_path, environment=False, kafka_bootstrap=f"127.0.0.1:{kafka}", sink_metrics=f"127.0.0.1:{port}")


@pytest.fixture
def metrics() -> Metrics:
    """Those of two sinks that have started."""
    made = Metrics()
    for name in ("a", "b"):
        made.started(name, {"t": {0: 5, 1: 0}, "u": {0: 1}})
    return made


class TestLag:
    def test_a_kafka_that_is_away_is_given_up_in_time(self, settings: Settings) -> None:
        began = time.monotonic()
        assert ask_lag(settings, {"a": {"t": {0: 0}}}, timeout_s=0.2) is None
        assert time.monotonic() - began < 5


class TestServed:
    def test_over_http_within_the_block_even_without_kafka(self, settings: Settings, metrics: Metrics) -> None:
        with served(settings, metrics):
            told = requests.get(f"http://{settings.sink_metrics}/metrics", timeout=30).text
            with raises("port-taken", str(settings.sink_metrics), "OUTBOX_SINK_METRICS"), served(settings, Metrics()):
                pytest.fail("two on one port")
        assert 'outbox_sink_rows_total{sink="a"} 0.0' in told
        assert "outbox_sink_kafka_up 0.0" in told
        assert "outbox_sink_lag_events{" not in told, "it is left out when it is not known"
        with served(settings, Metrics()):
            pass  # closed: the port can be had again

    def test_a_web_page_whose_name_leads_here_reads_nothing(self, settings: Settings) -> None:
        url = f"http://{settings.sink_metrics}"
        port = url.rpartition(":")[2]
        with served(settings, Metrics()):
            for path in ("/metrics", "/healthz"):
                for host in ("evil.example", f"127.0.0.1.evil.example:{port}", f"evil.example.:{port}", "[::1"):
                    answer = requests.get(url + path, headers={"Host": host}, timeout=30)
                    assert (answer.status_code, "outbox" in answer.text) == (421, False), (path, host)
            for host in (f"localhost:{port}", f"sink:{port}", f"[::1]:{port}", "10.0.0.1"):
                assert requests.get(f"{url}/healthz", headers={"Host": host}, timeout=30).status_code == 200

    def test_health_is_red_until_every_sink_runs(self, settings: Settings, metrics: Metrics) -> None:
        answers = []
        with served(settings, metrics):
            for of_b, failure in ((State.STARTING, None), (State.RUNNING, None), (State.FAILED, "events-lost")):
                metrics.now("a", State.RUNNING)
                metrics.now("b", of_b, failure)
                answers.append(requests.get(f"http://{settings.sink_metrics}/healthz", timeout=30))
        assert [answer.status_code for answer in answers] == [503, 200, 503]
        assert answers[-1].json()["sinks"] == {
            "a": {"state": "running", "failure": None},
            "b": {"state": "failed", "failure": "events-lost"},
        }
        assert [metrics.registry.get_sample_value("outbox_sink_up", {"sink": sink}) for sink in "ab"] == [1, 0]


# Which failures a sink survives by itself, and for how long it tries --------------------------------------------------


def test_the_delay_doubles_up_to_its_bound_and_then_the_sink_gives_up() -> None:
    retries = Retries()
    delays = [retries.delay_s("database-busy", float(number)) for number in range(FAILURES_MAX)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_DELAY_S] * (FAILURES_MAX - 7), None]
    assert retries.are_exhausted


def test_failures_before_a_success_and_of_long_ago_do_not_count() -> None:
    retries = Retries()
    for _ in range(3 * FAILURES_MAX):
        assert retries.delay_s("topic-silent", 0.0) == 1.0
        retries.succeeded()
    for number in range(3 * FAILURES_MAX):
        assert retries.delay_s("database-unavailable", number * (WITHIN_S + 1)) == 1.0


@pytest.mark.parametrize(
    ("code", "delay_s", "is_exhausted"),
    [
        ("topic-missing", 1.0, False),
        ("token-server-unavailable", 1.0, False),
        *((code, None, False) for code in ("checkpoint-unusable", "events-lost", "kafka-login-refused")),
        *((code, None, False) for code in ("sink-fenced", "sink-has-driver", "unexpected")),
        ("event-loop-blocked", None, True),  # passes in another process alone
    ],
)
def test_only_what_may_pass_is_tried_again(code: str, delay_s: float | None, is_exhausted: bool) -> None:
    retries = Retries()
    assert retries.delay_s(code, 0.0) == delay_s
    assert retries.are_exhausted is is_exhausted


# `outbox monitor` -----------------------------------------------------------------------------------------------------


REPORT = Report(
    topics=[TopicReport("t", lost=["a", "b"])],
    sinks=[SinkReport("s", comparisons=[ComparisonReport("c", drift={"k": Decimal(-3), "l": Decimal(4)})])],
)


@pytest.fixture
def unreachable(tmp_path: Path) -> Settings:
    """Of servers of which none answers."""
    [port] = ports.choose(0)
    url = DatabaseUrl(port=port)
    return load(tmp_path, environment=False).replace(
        source_db_url=url, sink_db_url=url, connect_url=f"http://127.0.0.1:{port}"
    )


def samples(collector: Monitor) -> dict[tuple[str, ...], float]:
    """By name and values of labels, in the order of their names."""
    registry = CollectorRegistry()
    registry.register(collector)
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_a_part_that_does_not_answer_has_no_metrics_and_is_down(unreachable: Settings) -> None:
    assert samples(monitor.of_project(unreachable)) == {
        ("outbox_monitor_up", part): 0.0 for part in ("source", "sink", "connect")
    }


def test_the_result_of_a_check_stays_until_the_next_that_does_not_fail(unreachable: Settings) -> None:
    collector = monitor.of_project(unreachable)
    assert collector.check(lambda: REPORT) is None
    found = samples(collector)
    assert (found["outbox_check_drift", "c", "s"], found["outbox_check_lost_events", "t"]) == (7, 2)
    assert found["outbox_check_failed",] == 0
    unled = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE))
    for error in (Failure("unavailable"), psycopg2.OperationalError(), unled):

        def fails(error: Exception = error) -> Report:
            raise error

        failure = collector.check(fails)
        assert failure is not None
        assert failure.code == ("failed" if isinstance(error, Failure) else "check-failed")
        assert samples(collector) == found | {("outbox_check_failed",): 1}


def test_a_web_page_whose_name_leads_to_the_monitor_reads_nothing(unreachable: Settings) -> None:
    [port] = ports.choose(0)
    ended, said = threading.Event(), queue.SimpleQueue[str]()
    serving = threading.Thread(target=monitor.serve, args=(unreachable, ("127.0.0.1", port), 3600, said.put, ended))
    serving.start()
    try:
        url = said.get(timeout=60).partition(" on ")[2]
        answer = requests.get(url, headers={"Host": f"evil.example:{port}"}, timeout=60)
        with raises("port-taken"):  # by this one
            monitor.serve(unreachable, ("127.0.0.1", port), 1, lambda _: None, ended)
    finally:
        ended.set()
        serving.join()
    assert (answer.status_code, "outbox" in answer.text) == (421, False)
