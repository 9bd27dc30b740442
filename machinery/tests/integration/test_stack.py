"""The embedded stack: started, broken and ended in every way, on private homes and ports; also by a test run."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import psycopg2
import pytest
import requests
from confluent_kafka import Producer

from outbox.base.settings import SECRET_NAMES, Settings, SinkRole, SourceRole, address, load, variable
from outbox.base.wait import wait_for
from outbox.kafka import topics
from outbox.kafka.clients import client_config
from outbox.migrations import roles
from outbox.relay import connectors
from outbox.relay.rest import Rest
from outbox_lab.stack import internals, ports
from outbox_lab.stack.postgres import UNPRIVILEGED, Postgres, unprivileged
from outbox_lab.stack.process import Process
from outbox_lab.stack.process import environment as environment_of
from outbox_lab.stack.stack import PARTS, PREFERRED, Stack
from outbox_lab.testing import homes as folders
from outbox_lab.testing.command import environment, outbox
from outbox_lab.testing.failures import raises
from outbox_lab.testing.fixtures.stack import private_stack
from outbox_lab.testing.homes import Homes, leftovers
from tests.endless import STARTED
from tests.support.fake_postgres import CLEAR_TEXT, MD5, listening
from tests.support.paths import ROOT
from tests.support.topic_reader import topic_of

CAP_DAC_READ_SEARCH = 2
CLOUD_KEY = ("AWS_SECRET_ACCESS_KEY", "a-key-of-the-developer")
ALTER_CONFIGS, BROKER = 44, 4  # an API of Kafka, and a type of resource
PROVIDERS = "org.apache.kafka.common.config.provider"


def command_lines() -> dict[int, str]:
    """Of every process of the machine, as `ps` shows them."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found[process.pid] = " ".join(process.cmdline())
    return found


def pids(stack: Stack) -> dict[str, int | None]:
    return {name: stack.part(name).pid() for name in PARTS}


def states(home: Path) -> dict[str, str]:
    """State of each part, as `outbox status` shows it."""
    return {name: told["state"] for name, told in json.loads(outbox("status", "--json", home=home).stdout).items()}


def passwords(settings: Settings) -> list[str]:
    """Every secret of a stack."""
    kept = internals.read(settings.home)
    own = [kept.postgres_password, kept.kafka_password, kept.connect_password]
    return [one.get_secret_value() for one in own + [getattr(settings, name) for name in SECRET_NAMES]]


def log_in(settings: Settings, role: SourceRole | SinkRole, **changed: str) -> None:
    """Connect as a role, with something changed, and leave again."""
    parameters: dict[str, Any] = {**settings.dsn(role), **changed}
    psycopg2.connect(**parameters).close()


def remember(settings: Settings, what: str) -> None:
    """Leave a row in Postgres and a record in Kafka, both acknowledged."""
    Postgres(settings).psql(
        f"CREATE TABLE IF NOT EXISTS memory (what text); INSERT INTO memory VALUES ('{what}')",
        settings.source_db_url.name,
    )
    topics.create(settings, connectors.topic_specs(settings))
    errors: list[object] = []
    producer = Producer({**client_config(settings), "acks": "all"})
    producer.produce(topic_of(settings), what, partition=0, on_delivery=lambda error, _: errors.append(error))
    producer.flush(30)
    assert errors == [None]


def remembered(settings: Settings) -> tuple[list[str], int]:
    """The rows in Postgres, and how many records Kafka has."""
    rows = Postgres(settings).psql("SELECT what FROM memory ORDER BY what", settings.source_db_url.name).stdout.split()
    return rows, topics.last_stable_offsets(settings, topic_of(settings))[0]


@pytest.fixture(scope="module")
def own(homes: Homes) -> Iterator[Stack]:
    """A whole stack to break, in a folder with a space in its name, of a developer who has the keys of a cloud."""
    stack = private_stack(homes.new("own"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*CLOUD_KEY)
        yield stack
    stack.down()


@pytest.fixture
def up(own: Stack) -> Stack:
    """The stack with every part running, whatever an earlier test did to it."""
    own.up()
    return own


@pytest.fixture(scope="module")
def own_postgres(homes: Homes) -> Iterator[Stack]:
    """A stack to break of which only Postgres runs, because that is quick."""
    stack = private_stack(homes.new("small"))
    yield stack
    stack.down()


@pytest.fixture
def small(own_postgres: Stack) -> Stack:
    """That stack with Postgres running, whatever an earlier test did to it."""
    own_postgres.up(only=["postgres"])
    return own_postgres


# Up ---------------------------------------------------------------------------------------------------------------


def ui_answers(part: Process) -> list[int]:
    """The answers of those ports of a part that speak HTTP, to a browser that looks for another host there."""
    found = []
    for connection in psutil.Process(part.pid()).net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            with suppress(requests.RequestException):
                url = f"http://{ports.LOOPBACK}:{connection.laddr.port}/json/"
                found.append(requests.get(url, headers={"Host": "evil.example"}, timeout=10).status_code)
    return found


def test_a_spark_cluster_is_made_by_the_command_shown_and_ended(up: Stack) -> None:
    done = outbox("up", "--workers", "1", home=up.home)
    assert done.returncode == 0, done.stderr
    shown = json.loads(outbox("status", "--json", home=up.home).stdout)
    assert {name: shown[name]["state"] for name in ("spark-master", "spark-worker-1")} == {
        "spark-master": "ready",
        "spark-worker-1": "ready",
    }
    for name in ("spark-master", "spark-worker-1"):
        assert ui_answers(up.part(name)) == [403], "a web page whose name leads to this host"
    assert load(up.home, environment=False).spark_master == f"spark://127.0.0.1:{internals.read(up.home).spark_port}"
    elsewhere = outbox("up", "--workers", "1", home=up.home, OUTBOX_SPARK_MASTER="spark://elsewhere:7077")
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert "OUTBOX_SPARK_MASTER=spark://elsewhere:7077" in elsewhere.stdout

    # As a command leaves it that was killed before it had stopped what is too many.
    msgspec.structs.replace(internals.read(up.home), spark_workers=0).write(up.home)
    assert outbox("up", "--workers", "0", home=up.home).returncode == 0
    assert [up.part(name).processes() for name in ("spark-master", "spark-worker-1")] == [[], []]
    assert load(up.home, environment=False).spark_master is None


def test_status_shows_a_killed_part_and_up_starts_it_again(up: Stack) -> None:
    before = pids(up)
    up.part("kafka").kill()
    seen = outbox("status", home=up.home)
    assert seen.returncode == 1
    assert "not ready: kafka" in seen.stderr
    assert states(up.home) == {**dict.fromkeys(PARTS, "ready"), "kafka": "stopped"}
    up.up()
    after = pids(up)
    assert {part for part in PARTS if after[part] != before[part]} == {"kafka"}
    assert states(up.home) == dict.fromkeys(PARTS, "ready")


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed at once", "down"])
def test_the_next_up_finds_data_ports_and_passwords(up: Stack, is_killed: bool) -> None:
    remember(up.settings, f"before_{is_killed}")
    known, chosen = remembered(up.settings), up.settings.stack_env_file.read_bytes()
    if is_killed:
        for process in [process for name in PARTS for process in up.part(name).processes()]:
            process.kill()
        wait_for("all to be gone", lambda: not leftovers(up.home), timeout_s=30)
    else:
        up.down()
        up.down()  # there is nothing to do, and that is fine
    assert leftovers(up.home) == []
    up.up()
    assert up.settings.stack_env_file.read_bytes() == chosen
    assert remembered(up.settings) == known


def test_down_ends_what_a_killed_start_has_left(home: Path) -> None:
    # Each start goes one part further, and begins on what the last one left.
    for seen in ("postgres", "connect"):
        part = Process(seen, home)
        command = [sys.executable, "-m", "outbox", "up"]
        with subprocess.Popen(command, env=environment(home), cwd=ROOT) as starting:
            try:
                wait_for(f"something of {seen}", part.processes, timeout_s=60, poll_s=0.01)
                assert starting.poll() is None
            finally:
                starting.kill()
        assert starting.returncode == -signal.SIGKILL
        # Mostly something outlives the command here; not always, as initdb ends when nobody reads what it says.
        Stack(load(home)).down()
        assert leftovers(home) == []


def test_two_commands_at_once_on_one_home_are_told_so(small: Stack) -> None:
    with small.locked(), raises("stack-locked", str(small.home)):
        small.up(only=["postgres"])


@contextmanager
def running_tests(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A test run in the middle of a test, and the home of its stack."""
    started = folder / "started"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "tests/endless.py"],
        cwd=ROOT,
        env={**os.environ, STARTED: str(started), folders.VARIABLE: str(folder / "homes")},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        # What a shell starts in the background ignores SIGINT, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  # no threads here
    )

    def home() -> str:
        assert process.poll() is None
        return started.read_text() if started.exists() else ""

    try:
        yield process, Path(wait_for("the stack of the run", home, timeout_s=120, poll_s=0.1))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        folders.sweep(folder / "homes")


@pytest.mark.parametrize(
    ("how", "options"),
    [(signal.SIGINT, ["-n", "1"]), (signal.SIGKILL, ["-p", "no:xdist"])],
    ids=["interrupted with xdist", "killed"],
)
def test_the_stack_of_an_interrupted_run_ends(how: signal.Signals, options: list[str], tmp_path: Path) -> None:
    with running_tests(tmp_path, *options) as (process, home):
        assert leftovers(home)
        process.send_signal(how)
        wait_for("every process to end", lambda: not leftovers(home), timeout_s=60, poll_s=0.2)


# Side by side -----------------------------------------------------------------------------------------------------


def test_two_stacks_stand_side_by_side(small: Stack, homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both prefer the same ports; the second takes others.
    taken = small.settings.source_db_url.port
    monkeypatch.setitem(PREFERRED, "postgres", taken)
    other = Stack(load(homes.new("other"), environment=False))
    try:
        reported: list[str] = []
        other.up(only=["postgres"], report=reported.append)
        assert other.settings.source_db_url.port != taken
        [moved] = [line for line in reported if str(taken) in line]
        assert f"postgres {other.settings.source_db_url.port}" in moved
        assert f"service {address(other.settings.service_bind)[1]}" in moved
        other.up(only=["postgres"], report=reported.append)
        assert sum(str(taken) in line for line in reported) == 1
        assert set(passwords(other.settings)).isdisjoint(passwords(small.settings))
        pid = small.part("postgres").pid()
        other.reset()
        assert small.part("postgres").pid() == pid
        assert small.part("postgres").is_ready()
        assert not other.home.exists()
    finally:
        other.down()


def test_a_backend_that_outlived_postgres_does_not_stop_the_next(small: Stack) -> None:
    postgres = Postgres(small.settings)
    # A backend that computes does not notice that its postmaster died, and holds on to the shared memory.
    busy = threading.Thread(target=lambda: postgres.psql("DO $$ BEGIN LOOP END LOOP; END $$", check=False))
    busy.start()
    try:
        looping = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'DO $$%' AND state = 'active'"
        wait_for("the backend to compute", lambda: postgres.psql(looping).stdout == "1\n", timeout_s=10)
        os.kill(postgres.pid() or 0, signal.SIGKILL)
        wait_for("the postmaster to be gone", lambda: not postgres.is_running(), timeout_s=10)
        wait_for("one backend to be left", lambda: len(postgres.processes()) == 1, timeout_s=10)
        small.up(only=["postgres"])
    finally:
        postgres.kill()
        busy.join()
    small.up(only=["postgres"])
    assert postgres.psql("SELECT 1").stdout == "1\n"


# Secrets and roles ------------------------------------------------------------------------------------------------


def test_stack_env_is_for_its_owner_only_and_each_password_is_another(small: Stack) -> None:
    for file in (small.settings.stack_env_file, small.home / internals.FILE):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    generated = passwords(small.settings)
    assert len(set(generated)) == len(generated)
    assert min(map(len, generated)) >= 24


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_finds_nothing_in_a_home() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home = Path(folder, "home")
        try:
            done = outbox("up", "postgres", home=home)
            assert done.returncode == 0, done.stderr
            finds = ["find", str(home), "-readable", "-printf", "%P may be read\\n"]
            found = subprocess.run(finds, user="nobody", capture_output=True, text=True, check=False)
            assert found.stdout == ""
            home.chmod(0o755)  # a folder that somebody had made before
            found = subprocess.run(finds, user="nobody", capture_output=True, text=True, check=False)
            assert found.stdout == " may be read\n"
        finally:
            outbox("down", home=home)


def test_no_password_is_in_a_log_or_command_line_or_environment_or_output(up: Stack) -> None:
    secrets = [*passwords(up.settings), CLOUD_KEY[1]]
    processes = {process.pid: process for name in PARTS for process in up.part(name).processes()}
    shown = {
        **{str(file): file.read_text() for file in (up.home / "logs").iterdir()},
        **{f"command line of {pid}": line for pid, line in command_lines().items()},
        **{f"environment of {pid}": str(environment_of(process)) for pid, process in processes.items()},
        "status": outbox("status", "--json", home=up.home).stdout,
        "up": outbox("up", home=up.home).stdout,
        "render": outbox("connect", "render", home=up.home).stdout,
    }
    assert len(shown) > 2 * len(PARTS) + 3
    assert [where for where, text in shown.items() if any(secret in text for secret in secrets)] == []


# Shut -------------------------------------------------------------------------------------------------------------


def stolen(settings: Settings) -> dict[str, str]:
    """A broker's configuration that lets Kafka read the password of a database's owner, and say it in an error."""
    return {
        "config.providers": "file",
        "config.providers.file.class": f"{PROVIDERS}.FileConfigProvider",
        "num.io.threads": f"${{file:{settings.stack_env_file}:{variable('source_db_owner_password')}}}",
    }


def kafka_text(text: str) -> bytes:
    return struct.pack("!h", len(text)) + text.encode()


def answer_to_stranger(port: int, properties: Mapping[str, str]) -> bytes:
    """Kafka's answer to a client that alters the broker without a login: empty if Kafka hangs up."""
    body = kafka_text("1") + struct.pack("!i", len(properties))
    for name, value in properties.items():
        body += kafka_text(name) + b"\0" + kafka_text(value)  # 0: set
    request = struct.pack("!hhi", ALTER_CONFIGS, 0, 1) + kafka_text("a stranger")
    request += struct.pack("!ib", 1, BROKER) + body + b"\0"  # to one resource; not only validated
    with socket.create_connection((ports.LOOPBACK, port), timeout=30) as connection, suppress(ConnectionError):
        connection.sendall(struct.pack("!i", len(request)) + request)
        return connection.recv(1 << 16)
    return b""


@pytest.mark.parametrize("listener", ["clients", "controller"])
def test_kafka_takes_no_request_without_a_login(up: Stack, listener: str) -> None:
    settings = up.settings
    of_clients, of_controller = int(settings.kafka_bootstrap.split(":")[1]), internals.read(up.home).controller_port
    port = of_clients if listener == "clients" else of_controller
    assert answer_to_stranger(port, stolen(settings)) == b""


@pytest.mark.parametrize("login", [None, ("outbox", "wrong"), ("stranger", "")])
def test_connect_takes_no_request_without_a_login(up: Stack, login: tuple[str, str] | None) -> None:
    settings = up.settings
    config = connectors.load(settings).config

    def status(method: str, path: str, json: object = None) -> int:
        return requests.request(method, settings.connect_url + path, json=json, auth=login, timeout=30).status_code

    plugin = "/connector-plugins/PostgresConnector/config"
    for path in ("/", "/connectors", "/connector-plugins", plugin, "/admin/loggers"):
        assert status("GET", path) == requests.codes.unauthorized, path
    assert status("PUT", f"{plugin}/validate", config) == requests.codes.unauthorized
    assert status("POST", "/connectors", {"name": "theirs", "config": config}) == requests.codes.unauthorized
    assert status("PUT", "/admin/loggers/root", {"level": "TRACE"}) == requests.codes.unauthorized
    # Workers do not log in at each other: they sign these.
    assert status("POST", "/connectors/theirs/tasks", []) >= requests.codes.bad_request
    assert status("PUT", "/connectors/theirs/fence") >= requests.codes.bad_request
    assert Rest(settings).state().connector == "MISSING"


@pytest.mark.parametrize(
    ("provider", "key", "secret"),
    [
        ("FileConfigProvider", "{home}/stack.env:{name}", "source_db_owner_password"),
        ("EnvVarConfigProvider", "{name}", CLOUD_KEY[0]),
        (None, "{name}", "source_db_cdc_password"),  # the worker's own
    ],
)
def test_no_connector_reads_a_secret(up: Stack, provider: str | None, key: str, secret: str) -> None:
    settings = up.settings
    topics.create(settings, connectors.topic_specs(settings))
    reference = key.format(home=settings.home, name=secret if secret in CLOUD_KEY else variable(secret))
    transform = {
        "type": "org.apache.kafka.connect.transforms.TimestampConverter$Value",
        "target.type": "string",
        "format": f"${{{'own' if provider else 'env'}:{reference}}}",  # an error shows a wrong format
    }
    if provider:
        transform |= {"config.providers": "own", "config.providers.own.class": f"{PROVIDERS}.{provider}"}
    written = connectors.load(settings).config
    config = {name: value for name, value in written.items() if not name.startswith("transforms")}
    config |= {"transforms": "own", **{f"transforms.own.{name}": value for name, value in transform.items()}}
    url, login = f"{settings.connect_url}/connectors", settings.connect_login
    assert requests.post(url, json={"name": "theirs", "config": config}, auth=login, timeout=30).ok

    def failed() -> str:
        answer = requests.get(f"{url}/theirs/status", auth=login, timeout=30).text
        return answer if "FAILED" in answer else ""

    try:
        answer = wait_for("the connector to fail", failed, timeout_s=60)
    finally:
        requests.delete(f"{url}/theirs", auth=login, timeout=30)
    assert [secret for secret in (*passwords(settings), CLOUD_KEY[1]) if secret in answer] == []


def validate(settings: Settings, config: Mapping[str, str]) -> None:
    """Let Debezium try a connector's configuration."""
    url = f"{settings.connect_url}/connector-plugins/PostgresConnector/config/validate"
    assert requests.put(url, json={**config, "name": "theirs"}, auth=settings.connect_login, timeout=60).ok


@pytest.mark.parametrize("question", [CLEAR_TEXT, MD5], ids=["clear text", "md5"])
def test_debezium_sends_its_password_to_no_other_server(up: Stack, question: bytes) -> None:
    # Also for somebody who may configure connectors.
    settings = up.settings
    user, secret = settings.role_name(SourceRole.CDC), settings.source_db_cdc_password.get_secret_value()
    config = dict(connectors.load(settings).config)
    del config["driver.requireAuth"]
    for password in ({}, {"database.password": "${env:OUTBOX_SOURCE_DB_CDC_PASSWORD}"}):
        with listening(question) as fake:
            address = {"database.hostname": ports.LOOPBACK, "database.port": str(fake.port)}
            validate(settings, {**config, **address, **password})
            assert fake.logins
        assert not fake.has_got(user, secret)


@pytest.mark.parametrize("question", [CLEAR_TEXT, MD5], ids=["clear text", "md5"])
def test_debezium_sends_no_password_if_it_is_asked_in_another_way(up: Stack, question: bytes) -> None:
    # Somebody may listen in the place of a Postgres that is down.
    settings = up.settings
    with listening(question) as fake:
        theirs = settings.replace(source_db_url=settings.source_db_url.replace(port=fake.port))
        validate(settings, {**connectors.load(theirs).config, "database.password": "hush"})
        assert fake.logins
    assert fake.answers == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts Postgres as another user")
def test_postgres_started_by_root_may_only_find_its_programs(tmp_path: Path) -> None:
    program = Path(shutil.copy(sys.executable, tmp_path / "closed")).resolve()
    tmp_path.chmod(0o700)
    source = f"import os; print(os.access({str(program)!r}, os.X_OK), os.getuid(), open('/proc/self/status').read())"
    argv = [str(word) for word in unprivileged([sys.executable, "-c", source])]
    found, user, *status = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    assert found == "True"
    assert int(user) == UNPRIVILEGED
    assert int(status[status.index("CapPrm:") + 1], 16) == 1 << CAP_DAC_READ_SEARCH


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts Postgres as another user")
def test_no_other_daemon_has_the_user_of_postgres(postgres: Postgres) -> None:
    # One of them could end it, or read its memory.
    users = {entry.pw_uid for entry in pwd.getpwall()}
    assert users.isdisjoint({*postgres.processes()[0].uids()})
    end_it = ["/bin/sh", "-c", f"kill -0 {postgres.pid()}"]
    done = subprocess.run(end_it, user="nobody", capture_output=True, text=True, check=False)
    assert "not permitted" in done.stderr


def test_everybody_is_asked_for_a_scram_password(postgres: Postgres, postgres_stack: Stack) -> None:
    methods = postgres.psql("SELECT DISTINCT auth_method FROM pg_hba_file_rules").stdout.split()
    assert methods == ["scram-sha-256"]
    stored = postgres.psql("SELECT DISTINCT left(rolpassword, 14) FROM pg_authid WHERE rolcanlogin").stdout.split()
    assert stored == ["SCRAM-SHA-256$"]
    for role in (*SourceRole, *SinkRole):
        log_in(postgres_stack.settings, role)
        for wrong in ("", "wrong"):
            with pytest.raises(psycopg2.OperationalError, match="password"):
                log_in(postgres_stack.settings, role, password=wrong)


def test_no_log_has_a_password(postgres: Postgres, postgres_stack: Stack) -> None:
    talkative = {"log_statement": "all", "log_min_duration_statement": "0", "log_min_duration_sample": "0"}
    talkative |= {"log_statement_sample_rate": "1", "log_transaction_sample_rate": "1"}
    try:
        for name, value in talkative.items():
            postgres.psql(f"ALTER ROLE postgres SET {name} = '{value}'")
        begin = postgres.log_file.stat().st_size
        for database in roles.DATABASES:
            roles.make(postgres_stack.settings, database, roles.Administrator("postgres", postgres.password))
        logged = postgres.log_file.read_bytes()[begin:].decode()
    finally:
        postgres.psql("ALTER ROLE postgres RESET ALL")
    assert "ALTER ROLE" in logged
    passwords = [value for name, value in postgres_stack.settings.as_env().items() if name.endswith("_PASSWORD")]
    assert not [password for password in passwords if password and password in logged]


def test_the_relay_reads_the_log_of_a_database_and_is_no_standby(postgres_stack: Stack) -> None:
    log_in(postgres_stack.settings, SourceRole.CDC, replication="database")
    with pytest.raises(psycopg2.OperationalError, match=r"no pg_hba\.conf entry for replication connection"):
        log_in(postgres_stack.settings, SourceRole.CDC, replication="true")


def test_no_role_is_wider_than_it_must_be(postgres: Postgres, postgres_stack: Stack) -> None:
    listed = postgres.psql(
        "SELECT rolname, rolsuper, rolcreatedb, rolcreaterole, rolbypassrls, rolreplication FROM pg_roles"
        " WHERE rolcanlogin AND rolname <> 'postgres'"
    ).stdout.split()
    replicates = {role: "t" if role is SourceRole.CDC else "f" for role in (*SourceRole, *SinkRole)}
    name = postgres_stack.settings.role_name
    assert sorted(listed) == sorted(f"{name(role)}|f|f|f|f|{may}" for role, may in replicates.items())


@pytest.mark.parametrize("role", [*SourceRole, *SinkRole])
def test_a_role_cannot_enter_the_other_database(role: SourceRole | SinkRole, postgres_stack: Stack) -> None:
    settings = postgres_stack.settings
    other = settings.sink_db_url.name if isinstance(role, SourceRole) else settings.source_db_url.name
    with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
        log_in(settings, role, dbname=other)


def test_nothing_listens_beyond_loopback(up: Stack) -> None:
    listening = {
        connection.laddr.ip
        for name in PARTS
        for process in up.part(name).processes()
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert {ip.removeprefix("::ffff:") for ip in listening} == {ports.LOOPBACK}
