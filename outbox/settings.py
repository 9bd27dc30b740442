"""Every setting, typed and validated at start.

Precedence, highest first: environment variables; ``.env`` in the project root; ``stack.env`` in the home folder,
which the embedded stack writes (ports it chose, passwords it generated); the defaults below. So a command does not
know whether it talks to the embedded stack, to docker-compose or to servers of your own.
"""

from __future__ import annotations

import os
import re
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pydantic
from dotenv import dotenv_values
from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outbox.errors import Failure

PROJECT_ROOT = Path(__file__).resolve().parent.parent
PREFIX = "OUTBOX_"
DOTENV = "OUTBOX_DOTENV"  # names another file in place of .env
SYSTEM_ROOTS = Path("system")  # libpq's word for the certificate authorities that the system trusts
DRIVER_MEMORY_MIN_MIB = 512  # Spark refuses to start with less than 450, of which the JVM keeps some to itself

SslMode = Literal["disable", "allow", "prefer", "require", "verify-ca", "verify-full"]


class LedgerRole(Enum):
    """The roles of the ledger database; their names are part of the contract (migrations/roles.sql)."""

    OWNER = "ledger_owner"
    APP = "ledger_app"
    CDC = "ledger_cdc"
    PRUNER = "ledger_pruner"
    AUDITOR = "ledger_auditor"


class BalancesRole(Enum):
    """The roles of the balances database."""

    OWNER = "balances_owner"
    SINK = "balances_sink"
    AUDITOR = "balances_auditor"


class Settings(BaseSettings):
    """All settings; the environment variable of a field is ``OUTBOX_`` and the field's name in capitals."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, env_ignore_empty=True)

    home: Path = Field(PROJECT_ROOT / ".outbox", description="folder of everything the commands write")

    stack_postgres_port: int = Field(15432, ge=0, le=65535, description="of the embedded stack; taken or 0: a free one")
    stack_kafka_port: int = Field(19092, ge=0, le=65535)
    stack_connect_port: int = Field(18083, ge=0, le=65535)
    stack_controller_port: int = Field(19093, ge=0, le=65535, description="of the embedded Kafka's controller")
    stack_postgres_password: SecretStr = Field(SecretStr(""), description="superuser of the embedded Postgres")
    maven_mirror: str | None = Field(None, description="URL of a mirror of Maven Central to take the JVM parts from")

    ledger_host: str = Field("127.0.0.1", description="Postgres of the service's database")
    ledger_port: int = Field(5432, ge=1, le=65535)
    ledger_dbname: str = "ledger"
    ledger_sslmode: SslMode = "prefer"
    ledger_sslrootcert: Path | None = Field(None, description="CA file, for verify-ca and verify-full")
    ledger_owner_password: SecretStr = Field(SecretStr(""), description="role that migrates")
    ledger_app_password: SecretStr = Field(SecretStr(""), description="role of the service")
    ledger_cdc_password: SecretStr = Field(SecretStr(""), description="role of Debezium")
    ledger_pruner_password: SecretStr = Field(SecretStr(""), description="role that deletes relayed outbox rows")
    ledger_auditor_password: SecretStr = Field(SecretStr(""), description="role that `outbox check` reads with")

    balances_host: str = Field("127.0.0.1", description="Postgres of the sinks' database")
    balances_port: int = Field(5432, ge=1, le=65535)
    balances_dbname: str = "balances"
    balances_sslmode: SslMode = "prefer"
    balances_sslrootcert: Path | None = Field(None, description="CA file, for verify-ca and verify-full")
    balances_owner_password: SecretStr = Field(SecretStr(""), description="role that migrates")
    balances_sink_password: SecretStr = Field(SecretStr(""), description="role of the sinks")
    balances_auditor_password: SecretStr = Field(SecretStr(""), description="role that `outbox check` reads with")

    kafka_bootstrap: str = Field("127.0.0.1:9092", description="host:port, comma separated")
    kafka_security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    kafka_username: str | None = Field(None, validate_default=True)
    kafka_password: SecretStr = SecretStr("")
    kafka_cafile: Path | None = Field(None, description="CA file (PEM) of the brokers")
    topic: str = Field("ledger.events", description="the topic of the events")
    topic_partitions: int = Field(4, ge=1)
    topic_retention_hours: int = Field(168, ge=1, description="how long the topic keeps events")
    topic_replication: int = Field(1, ge=1, description="replication factor of the topics that we create")

    prune_keep_hours: int = Field(24, ge=0, description="how long `outbox prune` leaves relayed events in the outbox")

    connect_url: str = Field("http://127.0.0.1:8083", description="Kafka Connect's REST interface")
    connect_username: str | None = Field(None, description="basic auth of Connect's REST interface")
    connect_password: SecretStr = SecretStr("")
    connect_cafile: Path | None = Field(None, description="CA file of Connect's REST interface")
    connector: str = Field("outbox", description="name of the connector and its slot", pattern="^[a-z0-9_]+$")
    connect_offsets_topic: str = Field("outbox.connect.offsets", description="the worker's offset.storage.topic")
    connect_ledger_host: str | None = Field(None, description="the ledger's host as seen from Connect, if another")
    connect_ledger_sslrootcert: str | None = Field(
        None, description="the ledger's CA file as seen from Connect, if another"
    )
    connect_ledger_password_reference: str = Field(
        "${env:OUTBOX_LEDGER_CDC_PASSWORD}",
        description="where Connect finds Debezium's password: a config provider of its worker, and a key there",
        pattern=r"^\$\{.+:.+\}$",
    )
    exactly_once: bool = Field(True, description="the one switch: Connect's exactly-once, worker and connector")

    service_host: str = "127.0.0.1"
    service_port: int = Field(8080, ge=0, le=65535)
    service_workers: int = Field(2, ge=1, description="gunicorn worker processes")
    service_threads: int = Field(4, ge=1, description="threads a worker; also its database connections")
    service_token: SecretStr = Field(SecretStr(""), description="bearer token that clients of the ledger send")
    idempotency_ttl_hours: int = Field(24, ge=1, description="how long an Idempotency-Key is remembered")

    sink_checkpoints: str | None = Field(None, description="URI of the Spark checkpoints; default: in the home folder")
    sink_lakehouse: str | None = Field(None, description="URI of the Delta tables; default: in the home folder")
    sink_max_offsets_per_trigger: int = Field(200_000, ge=1, description="events in one micro-batch at the most")
    sink_driver_memory: str = Field("768m", description="heap of the Spark driver")
    sink_metrics_host: str = "127.0.0.1"
    sink_metrics_port: int = Field(0, ge=0, le=65535, description="serves the sink's Prometheus metrics; 0: none")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "text", "json"] = Field("auto", description="auto: text on a terminal, else json")

    @field_validator("ledger_sslrootcert", "balances_sslrootcert", "kafka_cafile", "connect_cafile")
    @classmethod
    def _is_there(cls, file: Path | None, info: ValidationInfo) -> Path | None:
        """Told here once, not by each client in words of its own."""
        if file is None or file.is_file() or (file == SYSTEM_ROOTS and str(info.field_name).endswith("sslrootcert")):
            return file
        raise ValueError(f"there is no file {file}")

    @field_validator("kafka_username")
    @classmethod
    def _goes_with_sasl(cls, username: str | None, info: ValidationInfo) -> str | None:
        """A client that is given a name and no SASL would leave the name out, and say nothing."""
        protocol = str(info.data.get("kafka_security_protocol", ""))
        if protocol and (username is not None) is not protocol.startswith("SASL"):
            told = "needs a name" if username is None else "takes no name"
            raise ValueError(f"{PREFIX}KAFKA_SECURITY_PROTOCOL {protocol} {told}")
        return username

    @field_validator("sink_driver_memory")
    @classmethod
    def _is_a_heap(cls, memory: str) -> str:
        size = re.fullmatch(r"(\d+)([mg])", memory, re.IGNORECASE)
        if size is None or int(size[1]) * (1024 if size[2] in "gG" else 1) < DRIVER_MEMORY_MIN_MIB:
            raise ValueError(f"a number of m or g, as 768m or 2g; {DRIVER_MEMORY_MIN_MIB}m at the least")
        return memory

    def as_env(self) -> dict[str, str]:
        """All of it as environment variables, secrets too: what a process is given that must read the same settings."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            f"{PREFIX}{name.upper()}": str(value.get_secret_value() if isinstance(value, SecretStr) else value)
            for name, value in values.items()
            if value is not None
        }

    @property
    def stack_env_file(self) -> Path:
        """Where the embedded stack keeps the ports it chose and the passwords it generated (mode 600)."""
        return self.home / "stack.env"

    def is_embedded(self, *names: str) -> bool:
        """Whether these settings are what the embedded stack chose, or, before it chose, what is so by default."""
        chosen = dotenv_values(self.stack_env_file)
        return all(
            str(getattr(self, name))
            == (chosen.get(f"{PREFIX}{name.upper()}") or str(type(self).model_fields[name].default))
            for name in names
        )

    def dsn(self, role: LedgerRole | BalancesRole) -> dict[str, str | int]:
        """libpq connection parameters of a role, in the database that the role belongs to."""
        database = "ledger" if isinstance(role, LedgerRole) else "balances"
        password: SecretStr = getattr(self, f"{role.value}_password")
        parameters: dict[str, str | int] = {
            "host": getattr(self, f"{database}_host"),
            "port": getattr(self, f"{database}_port"),
            "dbname": getattr(self, f"{database}_dbname"),
            "user": role.value,
            "password": password.get_secret_value(),
            "sslmode": getattr(self, f"{database}_sslmode"),
        }
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


def database_passwords() -> list[str]:
    """The settings that are passwords of database roles."""
    return [f"{role.value}_password" for role in (*LedgerRole, *BalancesRole)] + ["stack_postgres_password"]


def load(home: Path | None = None, *, environment: bool = True, **overrides: Any) -> Settings:
    """Read the settings, of the given home folder or of the one that the environment or ``.env`` names.

    ``environment=False`` leaves the environment and ``.env`` out: what runs on a stack of its own must not reach
    another because somebody's shell points there. ``overrides`` are settings by name that win over everything.
    Raises Failure naming each setting that is wrong.
    """
    dotenv = os.environ.get(DOTENV, PROJECT_ROOT / ".env")
    try:
        if not environment:
            found = (home or PROJECT_ROOT / ".outbox").absolute()
            chosen = {
                name.removeprefix(PREFIX).lower(): value for name, value in dotenv_values(found / "stack.env").items()
            }
            return Settings(_env_prefix="NONE_OF_", _env_file=None, **{**chosen, "home": found, **overrides})
        found = (home or Settings(_env_file=dotenv).home).absolute()
        return Settings(_env_file=(found / "stack.env", dotenv), home=found, **overrides)
    except OSError as error:
        raise Failure(f"settings: {error}", "run as the user who owns the file, or name another OUTBOX_HOME") from None
    except pydantic.ValidationError as error:
        wrong = "; ".join(
            f"{PREFIX}{'_'.join(map(str, problem['loc'])).upper()}: {problem['msg'].removeprefix('Value error, ')}"
            for problem in error.errors()
        )
        raise Failure(f"wrong settings: {wrong}", "correct the environment variable or .env") from None
