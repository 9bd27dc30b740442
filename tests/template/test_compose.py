"""docker-compose.yml is valid, and is the twin of the embedded stack: same versions, same files, same roles."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr

from outbox.base.settings import PREFIX, Settings
from outbox.jvm import jars
from outbox.stack import connect, jvm, kafka, postgres
from tests.support.paths import ROOT

COMPOSE_FILE = ROOT / "docker-compose.yml"
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
ONE_SHOTS = {name for name, service in SERVICES.items() if service["restart"] == "no"}

# What we use of the Compose specification; another key is a mistake or is to be added here.
KEYS = {"build", "image", "pull_policy", "profiles", "entrypoint", "command", "environment", "volumes", "ports"}
KEYS |= {"depends_on", "healthcheck", "restart", "init", "stop_grace_period"}
KEYS |= {"mem_limit", "shm_size", "cap_drop", "security_opt", "network_mode", "user"}

every_service = pytest.mark.parametrize("name", SERVICES)


def mounts(name: str) -> Iterator[tuple[str, str, bool]]:
    """Source, target and whether read-only, of each mount of a service."""
    for mount in SERVICES[name].get("volumes", []):
        source, target, *mode = mount.split(":")
        yield source, target, mode == ["ro"]


def mounted_at(name: str, target: str) -> Path:
    """The file of ours that a service sees there."""
    [source] = [source for source, where, _ in mounts(name) if where == target]
    return (ROOT / source).resolve()


def words(name: str) -> str:
    """Everything that a service runs, and its environment."""
    service = SERVICES[name]
    environment = [f"{key}={value}" for key, value in service.get("environment", {}).items()]
    return "\n".join([*service.get("entrypoint", []), *service.get("command", []), *environment])


def ivy_version(module: str) -> str:
    [revision] = re.findall(rf'name="{module}" rev="([^"]+)"', jars.IVY_FILE.read_text())
    assert isinstance(revision, str)
    return revision


# Valid ------------------------------------------------------------------------------------------------------------


def test_docker_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("Docker's compose plugin is not installed; the checks beside this one hold without it")
    done = subprocess.run(
        [docker, "compose", "--file", COMPOSE_FILE, "--profile", "*", "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # warnings


@every_service
def test_keys_are_those_of_the_specification(name: str) -> None:
    assert set(SERVICES[name]) <= KEYS
    assert {"image", "build"} & set(SERVICES[name]), "nothing to run"


@every_service
def test_a_wait_can_come_true(name: str) -> None:
    for other, wait in SERVICES[name].get("depends_on", {}).items():
        match wait["condition"]:
            case "service_healthy":
                assert "healthcheck" in SERVICES[other]
            case "service_completed_successfully":
                assert other in ONE_SHOTS
            case unknown:
                pytest.fail(f"{name} waits for {other} to be {unknown}")


@every_service
def test_a_service_is_watched_or_ends_and_is_waited_for(name: str) -> None:
    if name not in ONE_SHOTS:
        assert "healthcheck" in SERVICES[name]
    elif "profiles" not in SERVICES[name]:
        # `docker compose up --wait` fails when a container ends that nobody waits for.
        assert any(name in service.get("depends_on", {}) for service in SERVICES.values())


@every_service
def test_mounts_are_there(name: str) -> None:
    for source, target, read_only in mounts(name):
        assert target.startswith("/")
        if source.startswith("./"):
            assert (ROOT / source).is_file()
            assert read_only
        else:
            assert source in COMPOSE["volumes"]


def test_no_volume_is_left_over() -> None:
    assert set(COMPOSE["volumes"]) == {source for name in SERVICES for source, _, _ in mounts(name) if source[0] != "."}


# Safe -------------------------------------------------------------------------------------------------------------


@every_service
def test_a_service_is_bounded(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert "mem_limit" in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@every_service
def test_an_image_of_ours_is_never_pulled(name: str) -> None:
    service = SERVICES[name]
    if service.get("image") == SERVICES["secrets"]["image"]:
        assert service["pull_policy"] == "never"
    assert ("build" in service) == (name in ("secrets", "connect"))


@every_service
def test_no_secret_is_in_the_file_and_one_service_writes_them(name: str) -> None:
    secret = {f"{PREFIX}{field}".upper() for field, of in Settings.model_fields.items() if of.annotation is SecretStr}
    assert not secret & set(SERVICES[name].get("environment", {}))
    assert not [key for key in SERVICES[name].get("environment", {}) if "PASSWORD" in key]
    assert not re.search(r"set -\w*x", words(name))  # a trace shows what it expands
    read_only = [read_only for source, _, read_only in mounts(name) if source == "secrets"]
    assert read_only in ([], [name != "secrets"])


# Twins ------------------------------------------------------------------------------------------------------------


def test_versions_are_those_of_the_embedded_stack() -> None:
    images = {name: service["image"] for name, service in SERVICES.items() if "image" in service}
    kafka_image = f"apache/kafka:{ivy_version('kafka_2.13')}"
    assert ivy_version("connect-runtime") == ivy_version("kafka_2.13")
    assert images["kafka"] == kafka_image
    assert f"FROM {kafka_image} AS connect\n" in DOCKERFILE.read_text()
    assert images["postgres"] == images["roles"] == f"postgres:{postgres.MAJOR}"


def test_files_are_those_of_the_embedded_stack() -> None:
    assert mounted_at("kafka", "/mnt/shared/config/server.properties") == ROOT / "connect" / "broker.properties"
    assert mounted_at("connect", "/etc/outbox/worker.properties") == ROOT / "connect" / "worker.properties"
    assert mounted_at("postgres", "/etc/outbox/postgres.conf") == postgres.CONFIG_FILE
    assert mounted_at("roles", "/etc/outbox/roles.sql") == postgres.ROLES_FILE
    for name in ("kafka", "connect"):
        assert mounted_at(name, "/etc/outbox/log4j2.properties") == ROOT / "connect" / "log4j2.properties"


@every_service
def test_what_is_run_is_what_is_mounted(name: str) -> None:
    assert set(re.findall(r"/etc/outbox/[\w.]+", words(name))) <= {target for _, target, _ in mounts(name)}


@pytest.mark.parametrize(("name", "part"), [("kafka", kafka.Kafka), ("connect", connect.Connect)])
def test_heaps_are_those_of_the_embedded_stack(name: str, part: type[jvm.Jvm]) -> None:
    assert f"-Xmx{part.heap}" in SERVICES[name]["environment"]["KAFKA_HEAP_OPTS"].split()


def test_the_broker_is_given_what_its_file_leaves_open() -> None:
    given = {
        key.removeprefix("KAFKA_").lower().replace("_", "."): value
        for key, value in SERVICES["kafka"]["environment"].items()
        if not key.endswith("_OPTS")
    }
    in_file = set(re.findall(r"^([\w.]+)=", (ROOT / "connect" / "broker.properties").read_text(), re.MULTILINE))
    assert set(given) == {"listeners", "advertised.listeners", "controller.quorum.voters", "log.dirs"}
    assert not set(given) & in_file
    assert given["log.dirs"] in {target for _, target, _ in mounts("kafka")}
    advertised = given["advertised.listeners"].removeprefix("CLIENT://")
    assert advertised == SERVICES["serve"]["environment"]["OUTBOX_KAFKA_BOOTSTRAP"]
    assert advertised == SERVICES["connect"]["environment"]["OUTBOX_KAFKA_BOOTSTRAP"]


def test_worker_and_connector_are_given_what_they_refer_to() -> None:
    files = [ROOT / "connect" / "worker.properties", *(ROOT / "connect").glob("*.json")]
    wanted = {name for file in files for name in re.findall(r"\$\{env:(\w+)", file.read_text())}
    exported = set(re.findall(r"export \W*(\w+)", words("connect"))) | set(re.findall(r"\^(\w+)=", words("connect")))
    assert wanted <= exported | set(SERVICES["connect"]["environment"])


def test_the_plugin_folder_is_where_the_worker_looks() -> None:
    [folder] = re.findall(r"^plugin.path=(.*)$", (ROOT / "connect" / "worker.properties").read_text(), re.MULTILINE)
    connect_stage = DOCKERFILE.read_text().split("\nFROM ")[3]
    assert connect_stage.startswith("apache/kafka")
    assert connect_stage.rstrip().endswith(f"WORKDIR /opt/outbox\nCOPY --from=jars /opt/plugin {folder}")


@every_service
def test_settings_are_ours(name: str) -> None:
    ours = {f"{PREFIX}{field}".upper() for field in Settings.model_fields}
    worker = (
        set(re.findall(r"\$\{env:(\w+)\}", (ROOT / "connect" / "worker.properties").read_text()))
        if name == "connect"
        else set()
    )
    assert set(re.findall(rf"\b{PREFIX}\w+", words(name))) <= ours | worker


# Images -----------------------------------------------------------------------------------------------------------


def test_what_is_copied_is_in_the_build_context() -> None:
    allowed = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), re.MULTILINE):
        *sources, _ = shlex.split(line)
        for source in sources:
            assert (ROOT / source).exists()
            assert source == "." or Path(source).parts[0] in allowed


def test_the_jars_stage_has_the_modules_it_runs() -> None:
    program = "import outbox.jvm.jars, sys; print(*(m.__file__ for n, m in sys.modules.items() if n[:6] == 'outbox'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    wanted = {Path(file).relative_to(ROOT).as_posix() for file in done.stdout.split()}
    copied = re.findall(r"^COPY (outbox/.*) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(" ".join(copied).split()) == wanted | {jars.IVY_FILE.relative_to(ROOT).as_posix()}


# Secrets ----------------------------------------------------------------------------------------------------------


def test_secrets_are_generated_once_and_a_shell_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "stack.env"
    command = [sys.executable, *SERVICES["secrets"]["command"][1:-1], str(file)]
    subprocess.run(command, check=True, cwd=ROOT)
    first = file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    wanted = set(re.findall(rf"\b{PREFIX}\w+", postgres.ROLES_FILE.read_text()))
    wanted |= {f"{PREFIX}STACK_POSTGRES_PASSWORD", f"{PREFIX}SERVICE_TOKEN"}
    read = subprocess.run(
        ["/bin/sh", "-c", f"set -a; . '{file}'; env"], capture_output=True, text=True, check=True, env={}
    ).stdout.splitlines()
    assert wanted == {line.partition("=")[0] for line in first.splitlines()}
    assert set(first.splitlines()) <= set(read)
    assert len({line.partition("=")[2] for line in first.splitlines()}) == len(wanted)  # no two the same

    subprocess.run(command, check=True, cwd=ROOT)
    assert file.read_text() == first

    kept, gone = first.splitlines(keepends=True)[1:], first.splitlines(keepends=True)[0]
    file.write_text("".join(kept))
    subprocess.run(command, check=True, cwd=ROOT)
    assert set(kept) < set(file.read_text().splitlines(keepends=True))
    assert gone.partition("=")[0] in file.read_text()
    assert list(tmp_path.iterdir()) == [file]
