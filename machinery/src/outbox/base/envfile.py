"""stack.env: what a stack chose and generated once, and keeps.

python -m outbox.base.envfile FOLDER

does it for a stack in containers. FOLDER/all/stack.env keeps every password, FOLDER/SERVICE/stack.env has those
that this service of docker-compose needs. A password in the environment takes the place of the generated one.
Containers of a Spark cluster, and its drivers, have the cluster's secret in ``spark.properties``.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from outbox.base.errors import Failure
from outbox.base.settings import SinkRole, SourceRole, password_setting, require_known, stack_env, variable

# A value that shells and python-dotenv read as it is.
PLAIN = re.compile(r"[\w.,:@%+/=^-]+", re.ASCII)
OWNERS = ("source_db_owner_password", "sink_db_owner_password")
AUDITORS = ("source_db_auditor_password", "sink_db_auditor_password")
ROLES = [password_setting(role) for role in (*SourceRole, *SinkRole)]
SECRETS = [*ROLES, "connect_password", "service_token"]
# By service of docker-compose, the secrets that its container gets in a file. No other has them.
SHARES: Mapping[str, Sequence[str]] = {
    "postgres": [],
    "roles": ROLES,
    "connect": ["source_db_cdc_password", "connect_password"],
    "migrate": OWNERS,
    "apply": ["source_db_cdc_password", "source_db_auditor_password", "connect_password"],
    "serve": ["source_db_app_password", "service_token"],
    "sink": ["sink_db_writer_password"],
    "demo": ["service_token", "source_db_cdc_password", "connect_password", *AUDITORS],
    "outbox": [*ROLES, "connect_password"],
    "monitor": [*AUDITORS, "connect_password"],
    "spark": [],
}
# The password of Postgres's superuser is no setting. initdb sets it: with a later one nobody could log in.
SUPERUSER, ADMINISTRATORS = "POSTGRES_PASSWORD", ("postgres", "roles")
SPARK_PROPERTIES = "spark.properties"
SPARK = ("spark", "sink", "outbox")  # who uses the cluster


def write(file: Path, values: Mapping[str, str]) -> None:
    """Let the file have these variables and no others. Mode 600."""
    if not file.exists() or stack_env(file) != values:
        write_private(file, "".join(f"{name}={_quoted(value)}\n" for name, value in values.items()))


def _quoted(value: str) -> str:
    """A value as python-dotenv reads it; for shells, those that share the files of containers have no quotes."""
    if PLAIN.fullmatch(value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def write_private(file: Path, text: str) -> None:
    """Write a file that has secrets. Whole or not at all: half a file would bring half the passwords. Mode 600."""
    staging = file.with_name(f"{file.name}.new")
    staging.unlink(missing_ok=True)
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())  # the passwords may be in use by a database before they are on disk
    staging.replace(file)


def secret() -> str:
    """A fresh secret. Fit for a shell to read, for a properties file and for a file of passwords."""
    return secrets.token_urlsafe(24)


def generate(*names: str) -> dict[str, str]:
    """A fresh secret for each variable of SECRETS, and for further settings."""
    return {variable(name): secret() for name in (*SECRETS, *names)}


def secrets_of(command: str = "") -> Sequence[str]:
    """The secrets that the process of an `outbox` command gets on the embedded stack."""
    match command:
        case "serve":
            return SHARES["serve"]
        case "sink" | "handle":
            return [*SHARES["sink"], "kafka_password"]
    return [*SHARES["outbox"], "kafka_password", "service_token"]


def share(folder: Path, services: Mapping[str, Sequence[str]] = SHARES) -> None:
    """Generate the passwords that FOLDER/all/stack.env lacks, and write the ``stack.env`` of each service.

    ``services`` has the names of the secrets that each needs. Their files are readable by the group too, for a service
    that runs as a user of its own.

    Raises Failure for a variable that looks like a setting but is not one: docker-compose gives this container all of
    .env, and others the settings that it names, whose values are looked at there. Raises Failure if a password of the
    environment would need quotes.
    """
    require_known(os.environ)
    every = folder / "all" / "stack.env"
    generated = generate()
    given = {name: value for name in generated if (value := os.environ.get(name))}
    for name, value in given.items():
        if not PLAIN.fullmatch(value):
            raise Failure(
                f"{name} has characters that a shell would change",
                "use letters, digits and . , : @ % + / = ^ - _",
                code="secret-needs-quotes",
            )
    write(every, {SUPERUSER: secret(), **generated, **stack_env(every), **given})
    kept = stack_env(every)
    properties = every.with_name(SPARK_PROPERTIES)  # of master, workers and drivers of a Spark cluster
    if not properties.exists():
        write_private(properties, f"spark.authenticate true\nspark.authenticate.secret {secret()}\n")
    for service, names in services.items():
        file = folder / service / "stack.env"
        needed = [*map(variable, names), *([SUPERUSER] if service in ADMINISTRATORS else [])]
        write(file, {name: kept[name] for name in needed})
        if service in SPARK:
            write_private(file.with_name(SPARK_PROPERTIES), properties.read_text())
        file.parent.chmod(0o750)
        file.chmod(0o640)


if __name__ == "__main__":
    try:
        share(Path(sys.argv[1]))
    except Failure as failure:
        sys.exit(f"envfile: {failure}")
