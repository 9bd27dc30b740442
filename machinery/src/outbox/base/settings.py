"""Every setting, typed and validated at start.

Precedence, highest first: environment variables; ``.env`` in the project root; ``stack.env`` in the home folder,
which the embedded stack writes (ports it chose, passwords it generated); the defaults below. So a command does not
know whether it talks to the embedded stack, to docker-compose or to servers of your own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import pydantic
from dotenv import dotenv_values
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator

from outbox.base import project, wait
from outbox.base.errors import Failure

PREFIX = "OUTBOX_"
DOTENV = "OUTBOX_DOTENV"  # names another file in place of .env
# Variables with the prefix that are no settings, and who reads them.
READ_ELSEWHERE = {
    DOTENV: "this module",
    project.VARIABLE: "outbox/base/project.py",
    wait.SCALE_VARIABLE: "outbox/base/wait.py",
    "OUTBOX_JVM_ARCHIVES": "outbox/jvm/archive.py",
    "OUTBOX_JVM_LOG_LEVEL": "the logging file of broker and worker",
    "OUTBOX_PROCESS": "outbox_lab/stack/process.py",
    "OUTBOX_CONNECT_LISTENER": "the worker's properties",
    "OUTBOX_CONNECT_EXACTLY_ONCE": "the worker's properties",
    "OUTBOX_CONNECT_KEYSTORE": "the properties of a worker with TLS: docs/bring-your-own.md",
    "OUTBOX_GRAFANA_PORT": "docker-compose.yml",
    "OUTBOX_PROMETHEUS_PORT": "docker-compose.yml",
    "OUTBOX_SINK_MEMORY_LIMIT": "docker-compose.yml",
    "OUTBOX_SPARK_CORES": "docker-compose.yml",
    "OUTBOX_TEST_SEED": "tests",
}
SYSTEM_ROOTS = Path("system")  # libpq's word for the certificate authorities that the system trusts
DRIVER_MEMORY_MIN_MIB = 512  # Spark refuses to start with less than 450, of which the JVM keeps some to itself

# The embedded stack's logins are for its own servers: with another address they do not count.
LOGINS = {
    "kafka_bootstrap": ("kafka_security_protocol", "kafka_sasl_mechanism", "kafka_username", "kafka_password"),
    "connect_url": ("connect_username", "connect_password"),
}

FILES = ("source_db_sslrootcert", "sink_db_sslrootcert", "kafka_cafile", "connect_cafile", "spark_properties")
NAME = "^[a-z][a-z0-9_]*$"
SLOT = "^[a-z0-9_]+$"
# Postgres cuts a longer name off, and then does not find what it has made.
NAME_MAX = 63

SCRAM = "scram-sha-256"  # the name of libpq
SslMode = Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]


class SourceRole(Enum):
    """The roles of the service's database. In Postgres each is named ``<prefix>_<role>``: `Settings.role_name`."""

    OWNER = "owner"
    APP = "app"
    CDC = "cdc"
    PRUNER = "pruner"
    AUDITOR = "auditor"


class SinkRole(Enum):
    """The roles of the sinks' database."""

    OWNER = "owner"
    WRITER = "writer"
    PRUNER = "pruner"
    AUDITOR = "auditor"


Role = SourceRole | SinkRole
ROLE_PREFIX_MAX = NAME_MAX - max(len(f"_{role.value}") for role in (*SourceRole, *SinkRole))


def _named(name: str, **options: Any) -> Any:
    """A field whose default is a name that the project chose."""
    return Field(default_factory=lambda: getattr(project.current(), name), **options)


class Settings(BaseModel):
    """All settings; the environment variable of a field is ``OUTBOX_`` and the field's name in capitals."""

    model_config = ConfigDict(extra="ignore", frozen=True, validate_default=True)

    home: Path = _named("home", description="folder of everything that the commands write")

    stack_postgres_port: int = Field(
        15432, ge=0, le=65535, description="ports of the embedded stack; another free one is used if it is taken or 0"
    )
    stack_kafka_port: int = Field(19092, ge=0, le=65535)
    stack_connect_port: int = Field(18083, ge=0, le=65535)
    stack_controller_port: int = Field(19093, ge=0, le=65535, description="port of the embedded Kafka's controller")
    stack_spark_port: int = Field(17077, ge=0, le=65535, description="port of the embedded Spark cluster's master")
    stack_spark_workers: int = Field(
        0, ge=0, description="workers of the embedded Spark cluster; `outbox up --workers` sets this"
    )
    stack_postgres_version: int = Field(18, ge=15, le=18, description="major version of the embedded Postgres")
    stack_postgres_password: SecretStr = Field(SecretStr(""), description="superuser of the embedded Postgres")
    stack_kafka_password: SecretStr = Field(SecretStr(""), description="the embedded broker's login at itself")
    stack_connect_password: SecretStr = Field(SecretStr(""), description="the embedded worker's login at the broker")
    maven_mirror: str | None = Field(None, description="URL of a mirror of Maven Central for the JVM parts")

    source_db_host: str = Field("127.0.0.1", description="Postgres of the service's database")
    source_db_port: int = Field(5432, ge=1, le=65535)
    source_db_name: str = _named("source_database", min_length=1, max_length=NAME_MAX)
    source_db_role_prefix: str = _named(
        "source_database", pattern=NAME, max_length=ROLE_PREFIX_MAX, description="prefix of its roles' names"
    )
    source_db_sslmode: SslMode = "prefer"
    source_db_sslrootcert: Path | None = Field(None, description="CA file, for verify-ca and verify-full")
    source_db_owner_password: SecretStr = Field(SecretStr(""), description="role that migrates")
    source_db_app_password: SecretStr = Field(SecretStr(""), description="role of the service")
    source_db_cdc_password: SecretStr = Field(SecretStr(""), description="role of Debezium")
    source_db_pruner_password: SecretStr = Field(SecretStr(""), description="role that deletes relayed outbox rows")
    source_db_auditor_password: SecretStr = Field(SecretStr(""), description="role with which `outbox check` reads")

    sink_db_host: str = Field("127.0.0.1", description="Postgres of the sinks' database")
    sink_db_port: int = Field(5432, ge=1, le=65535)
    sink_db_name: str = _named("sink_database", min_length=1, max_length=NAME_MAX)
    sink_db_role_prefix: str = _named(
        "sink_database", pattern=NAME, max_length=ROLE_PREFIX_MAX, description="prefix of its roles' names"
    )
    sink_db_sslmode: SslMode = "prefer"
    sink_db_sslrootcert: Path | None = Field(None, description="CA file, for verify-ca and verify-full")
    sink_db_owner_password: SecretStr = Field(SecretStr(""), description="role that migrates")
    sink_db_writer_password: SecretStr = Field(SecretStr(""), description="role of the sinks")
    sink_db_pruner_password: SecretStr = Field(SecretStr(""), description="role that deletes expired rows")
    sink_db_auditor_password: SecretStr = Field(SecretStr(""), description="role with which `outbox check` reads")

    db_password_command: str | None = Field(
        None, description="prints the password of role $PGUSER at $PGHOST:$PGPORT; it is run before each connection"
    )

    kafka_bootstrap: str = Field("127.0.0.1:9092", description="comma-separated list of host:port")
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    kafka_username: str | None = Field(None, validate_default=True)
    kafka_password: SecretStr = SecretStr("")
    kafka_cafile: Path | None = Field(None, description="CA file (PEM) of the brokers")
    topic_prefix: str = _named("topic_prefix", description="first part of the names of the events' topics")
    topic_partitions: int = Field(
        4, ge=1, description="partitions of a topic, unless its aggregate.toml names another number"
    )
    topic_retention_hours: int = Field(168, ge=1, description="how long the topics keep events")
    topic_replication: int = Field(1, ge=1, description="replication factor of the topics that we create")

    prune_keep_hours: int = Field(24, ge=0, description="how long `outbox prune` leaves relayed events in the outbox")
    prune_landed_events_days: int = Field(90, ge=1, description="how long strategy `merge` keeps events, at least")
    prune_dead_letters_days: int = Field(90, ge=1, description="how long resolved dead letters are kept, at least")

    connect_url: str = Field("http://127.0.0.1:8083", description="Kafka Connect's REST interface")
    connect_username: str | None = Field(None, description="basic auth of Connect's REST interface")
    connect_password: SecretStr = SecretStr("")
    connect_cafile: Path | None = Field(None, description="CA file of Connect's REST interface")
    connector: str = _named(
        "connector", description="name of the connector and its slot", pattern=SLOT, max_length=NAME_MAX
    )
    connector_poll_interval_ms: int = Field(
        5,
        ge=1,
        description="how long a poll of the connector collects events; a shorter time makes more work for an idle one",
    )
    connect_fetch_max_wait_ms: int = Field(
        20,
        ge=1,
        description="how long the worker's fetches wait for records; a shorter time makes more work for an idle one",
    )
    connect_group_id: str = Field("outbox-connect", description="the worker's group.id")
    connect_offsets_topic: str = Field("outbox.connect.offsets", description="the worker's offset.storage.topic")
    connect_source_db_host: str | None = Field(
        None, description="the source database's host as seen from Connect, if it differs"
    )
    connect_source_db_sslrootcert: str | None = Field(
        None, description="the source database's CA file as seen from Connect, if it differs"
    )
    connect_source_db_password_reference: str | None = Field(
        None,
        description="where Connect finds Debezium's password: a config provider of its worker, and a key there; "
        "default: in the password file of its driver (PGPASSFILE)",
        pattern=r"^\$\{.+:.+\}$",
    )
    exactly_once: bool = Field(True, description="the switch for Connect's exactly-once, in worker and connector")

    service_host: str = "127.0.0.1"
    service_port: int = Field(8080, ge=0, le=65535)
    service_workers: int = Field(2, ge=1, description="gunicorn worker processes")
    service_threads: int = Field(4, ge=1, description="threads per worker, and database connections per worker")
    service_request_timeout_s: float = Field(
        10, gt=0, description="how long a request may take to arrive, and a response to be read"
    )
    service_token: SecretStr = Field(SecretStr(""), description="bearer token that clients of the service send")
    idempotency_ttl_hours: int = Field(24, ge=1, description="how long an Idempotency-Key is remembered")

    sink_checkpoints: str | None = Field(None, description="URI of the Spark checkpoints; default: in the home folder")
    sink_lakehouse: str | None = Field(None, description="URI of the Delta tables; default: in the home folder")
    sink_max_offsets_per_trigger: int = Field(
        500_000, ge=1, description="maximum number of records in one micro-batch, and in each part of an earlier one"
    )
    sink_trigger_interval_ms: int = Field(
        0, ge=0, description="a micro-batch begins at most this often, which saves CPU; 0: as soon as there are events"
    )
    sink_id_age_max_days: int = Field(
        3660, ge=1, description="how far the time in an event's id may be behind its record; older ones are set aside"
    )
    spark_master: str | None = Field(
        None,
        description="where the sinks' tasks run: a Spark cluster's master; default: local[2], in the sinks' process",
    )
    spark_properties: Path | None = Field(
        None, description="file of further Spark properties, like spark-defaults.conf; those that we need win"
    )
    sink_driver_memory: str = Field("768m", description="heap of the Spark driver")
    sink_metrics_host: str = "127.0.0.1"
    sink_metrics_port: int = Field(0, ge=0, le=65535, description="port of the sinks' metrics and health; 0: none")

    monitor_host: str = Field("127.0.0.1", description="where `outbox monitor` serves its metrics")
    monitor_port: int = Field(9401, ge=0, le=65535, description="port of `outbox monitor`; 0: a free one")

    demo_host: str = Field("127.0.0.1", description="where the walkthrough's player serves a page, if it has one")
    demo_port: int = Field(8090, ge=0, le=65535, description="another free port is used if it is taken or 0")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else json")

    @field_validator(*FILES)
    @classmethod
    def _is_there(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        """Told here once, not by each client in words of its own."""
        if file is None or file.is_file() or (file == SYSTEM_ROOTS and str(info.field_name).endswith("sslrootcert")):
            return file
        raise ValueError(f"there is no file {file}")

    @field_validator("connect_url")
    @classmethod
    def _has_no_login(cls, url: str) -> str:
        """An address is shown in messages, and passed on."""
        if "@" in urlsplit(url).netloc:
            raise ValueError(f"take user and password out: {PREFIX}CONNECT_USERNAME, {PREFIX}CONNECT_PASSWORD")
        return url

    @field_validator("sink_checkpoints", "sink_lakehouse")
    @classmethod
    def _has_no_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(f"take the password out; it belongs into the file of {PREFIX}SPARK_PROPERTIES")
        return uri

    @field_validator("kafka_username")
    @classmethod
    def _goes_with_sasl(cls, username: str | None, info: ValidationInfo) -> str | None:
        """A client that is given a name and no SASL would leave the name out, and say nothing."""
        protocol = str(info.data.get("kafka_security_protocol", ""))
        if protocol and (username is not None) is not protocol.startswith("SASL"):
            problem = "needs a name" if username is None else "takes no name"
            raise ValueError(f"{PREFIX}KAFKA_SECURITY_PROTOCOL {protocol} {problem}")
        return username

    @field_validator("sink_driver_memory")
    @classmethod
    def _is_a_heap(cls, memory: str) -> str:
        size = re.fullmatch(r"(\d+)([mg])", memory, re.IGNORECASE)
        if size is None or int(size[1]) * (1024 if size[2] in "gG" else 1) < DRIVER_MEMORY_MIN_MIB:
            raise ValueError(f"a number of m or g, as 768m or 2g; {DRIVER_MEMORY_MIN_MIB}m at the least")
        return memory

    def as_env(self) -> dict[str, str]:
        """All settings as environment variables, secrets included, for a process that must read the same settings."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            variable(name): str(value.get_secret_value() if isinstance(value, SecretStr) else value)
            for name, value in values.items()
            if value is not None
        }

    def without_secrets(self, *keep: str) -> Settings:
        """The settings without passwords and tokens but the given ones, for a process that needs no others."""
        secrets = {name for name, value in self if isinstance(value, SecretStr)} - {*keep}
        return self.model_copy(update=dict.fromkeys(secrets, SecretStr("")))

    @property
    def stack_env_file(self) -> Path:
        """Where the embedded stack keeps the ports it chose and the passwords it generated (mode 600)."""
        return self.home / "stack.env"

    @property
    def stack_spark_properties(self) -> Path:
        """Properties with which a driver uses the embedded Spark cluster, its secret among them (mode 600)."""
        return self.home / "spark.properties"

    def is_embedded(self, *names: str) -> bool:
        """Whether these settings are what the embedded stack chose, or, before it chose, what is so by default."""
        chosen = dotenv_values(self.stack_env_file)
        return all(
            str(getattr(self, name)) == (chosen.get(variable(name)) or str(type(self).model_fields[name].default))
            for name in names
        )

    @property
    def markers_topic(self) -> str:
        """The aggregate type and the topic of the rows that `outbox prune` sends through the relay; nobody reads it."""
        return f"{self.connector}.markers"

    @property
    def connect_login(self) -> tuple[str, str] | None:
        """The login at Connect's REST interface, if it asks for one."""
        name = self.connect_username
        return None if name is None else (name, self.connect_password.get_secret_value())

    def role_name(self, role: Role) -> str:
        return f"{getattr(self, f'{role_database(role)}_role_prefix')}_{role.value}"

    def dsn(self, role: Role) -> dict[str, str | int]:
        """libpq connection parameters of a role, in the database that the role belongs to."""
        database = role_database(role)
        password: SecretStr = getattr(self, password_setting(role))
        parameters: dict[str, str | int] = {
            "host": getattr(self, f"{database}_host"),
            "port": getattr(self, f"{database}_port"),
            "dbname": getattr(self, f"{database}_name"),
            "user": self.role_name(role),
            "password": password.get_secret_value(),
            "sslmode": getattr(self, f"{database}_sslmode"),
        }
        if parameters["sslmode"] != "verify-full":
            # A process that has taken the server's port gets no password: with SCRAM it stays here, and both sides show
            # that they know it. A server whose certificate is checked may ask in other ways.
            parameters["require_auth"] = SCRAM
        rootcert: Path | None = getattr(self, f"{database}_sslrootcert")
        if rootcert is not None:
            parameters["sslrootcert"] = str(rootcert)
        return parameters

    @property
    def checkpoints(self) -> str:
        """The folder or URI under which each sink keeps its Spark checkpoint.

        As Hadoop reads it: nothing is percent-encoded, a space in a path is a space.
        """
        return self.sink_checkpoints or f"file://{self.home}/checkpoints"

    @property
    def lakehouse(self) -> str:
        """The folder or URI under which each sink that is a Delta table has it; written as that of the checkpoints."""
        return self.sink_lakehouse or f"file://{self.home}/lakehouse"


def variable(setting: str) -> str:
    return f"{PREFIX}{setting.upper()}"


def role_database(role: Role) -> Literal["source_db", "sink_db"]:
    """How the settings of the role's database begin."""
    return "source_db" if isinstance(role, SourceRole) else "sink_db"


def password_setting(role: Role) -> str:
    return f"{role_database(role)}_{role.value}_password"


def database_passwords() -> list[str]:
    return [*map(password_setting, (*SourceRole, *SinkRole)), "stack_postgres_password"]


def load(home: Path | None = None, *, environment: bool = True, **overrides: Any) -> Settings:
    """Read the settings, of the given home folder or of the one that the environment or ``.env`` names.

    ``environment=False`` leaves the environment and ``.env`` out: what runs on a stack of its own must not reach
    another because somebody's shell points there. ``overrides`` are settings by name that win over everything.
    Raises Failure naming each setting that is wrong, and each variable that is no setting.
    """
    names = project.current()
    dotenv = Path(os.environ.get(DOTENV, names.root / ".env"))
    wrong: list[str] = []
    try:
        if not environment:
            found = (home or names.home).resolve()
            return Settings(**{**_given(dotenv_values(found / "stack.env")), "home": found, **overrides})
        in_dotenv = dotenv_values(dotenv)
        wrong += _unknown("the environment", os.environ)
        wrong += _unknown(dotenv, in_dotenv)
        given = {**_given(in_dotenv), **_given(os.environ)}
        found = (home or Path(given.get("home", names.home))).resolve()
        chosen = dotenv_values(found / "stack.env")
        wrong += _unknown(found / "stack.env", chosen)
        others = _logins_of_others(_given(chosen), given)
        loaded = Settings(**{**_given(chosen), **others, **given, "home": found, **overrides})
    except OSError as error:
        raise Failure(
            f"settings: {error}",
            "run as the user who owns the file, or name another OUTBOX_HOME",
            code="settings-unreadable",
        ) from None
    except pydantic.ValidationError as error:
        wrong += [
            f"{variable('_'.join(map(str, problem['loc'])))}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        ]
    if wrong:
        raise _wrong(wrong, dotenv.name)
    return loaded


def _given(variables: Mapping[str, str | None]) -> dict[str, str]:
    """The settings among variables, whatever their case. An empty variable stands for the default."""
    named = {name.upper(): value for name, value in variables.items() if value}
    return {name: named[variable(name)] for name in Settings.model_fields if variable(name) in named}


def _logins_of_others(chosen: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Any]:
    """Defaults in place of the logins that the embedded stack chose, for servers at other addresses."""
    names: list[str] = []
    for address, login in LOGINS.items():
        own = chosen.get(address)
        if own and given.get(address, own) != own:  # docker-compose's file has logins alone
            names += login
    return {name: Settings.model_fields[name].default for name in names}


def require_known(environment: Mapping[str, str]) -> None:
    """Raises Failure naming each variable of a container that looks like a setting but is not one, and each that is not
    written in capitals, because a container reads no other.
    """
    small = [name for name in environment if name.upper().startswith(PREFIX) and name != name.upper()]
    wrong = [*_unknown(".env", environment), *(f"{name} in .env: write it in capitals" for name in small)]
    if wrong:
        raise _wrong(wrong, ".env")


def _wrong(problems: Sequence[str], dotenv: str) -> Failure:
    return Failure(
        f"wrong settings: {'; '.join(problems)}",
        f"correct the environment variable, {dotenv} or stack.env; the default of a name is in pyproject.toml",
        code="settings-wrong",
    )


def _unknown(place: str | Path, names: Iterable[str]) -> Iterator[str]:
    """Each variable that looks like a setting but is not one, with the setting that the user may mean.

    Without this a misspelled setting would have no effect, and nobody would notice.
    """
    known = {variable(name) for name in Settings.model_fields}
    for name in map(str.upper, names):  # as `_given` compares them
        if name.startswith(PREFIX) and name not in known and name not in READ_ELSEWHERE:
            [nearest] = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0)
            yield f"{name} in {place}: there is no such setting; {nearest} is the nearest"
