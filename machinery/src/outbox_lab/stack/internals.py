"""The values that an embedded stack keeps to itself. They are no settings, because only its own servers need them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from outbox.base import envfile
from outbox.base.settings import Secret

FILE = "stack.json"
FRESH: Any = msgspec.field(default_factory=lambda: Secret(envfile.secret()))


class Internals(msgspec.Struct, frozen=True, kw_only=True):
    """Passwords, ports and a version that were chosen at the first start, and the size of the Spark cluster."""

    postgres_version: int = 18  # the major one, by default that of the wheel
    postgres_password: Secret = FRESH  # of the superuser
    kafka_password: Secret = FRESH  # with which the broker logs in at itself
    connect_password: Secret = FRESH  # with which the worker logs in at the broker
    controller_port: int = 0
    spark_port: int = 0
    spark_workers: int = 0

    def write(self, home: Path) -> None:
        """Keep this in a home folder. Mode 600."""
        text = msgspec.json.encode(self, enc_hook=Secret.get_secret_value)
        envfile.write_private(home / FILE, msgspec.json.format(text).decode())


def read(home: Path) -> Internals:
    """The values that the stack of a home folder keeps; new ones before its first start."""
    file = home / FILE
    if not file.exists():
        return Internals()
    return msgspec.json.decode(file.read_bytes(), type=Internals, dec_hook=lambda kind, value: kind(value))
