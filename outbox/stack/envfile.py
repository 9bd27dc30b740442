"""stack.env: what a stack chose and generated once, and keeps.

python -m outbox.stack.envfile FILE     add the secrets that it lacks
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from outbox.base.settings import PREFIX, database_passwords


def read(file: Path) -> dict[str, str]:
    """The variables of the file by name; none if there is no file."""
    return dict(line.split("=", 1) for line in file.read_text().splitlines()) if file.exists() else {}


def add(file: Path, values: Mapping[str, str]) -> None:
    """Add the variables that the file lacks; what it says already, stays. Mode 600."""
    chosen = read(file)
    missing = {name: value for name, value in values.items() if name not in chosen}
    if not missing:
        return
    # Whole or not at all: half a file would bring half the passwords.
    staging = file.with_name(f"{file.name}.new")
    staging.unlink(missing_ok=True)
    with os.fdopen(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.writelines(f"{name}={value}\n" for name, value in {**chosen, **missing}.items())
        out.flush()
        os.fsync(out.fileno())  # the passwords may be in use by a database before they are on disk
    staging.replace(file)


def generate() -> dict[str, str]:
    """A fresh secret for each database role and for the clients of the service. Fit for a shell to read."""
    return {f"{PREFIX}{name.upper()}": secrets.token_urlsafe(24) for name in [*database_passwords(), "service_token"]}


if __name__ == "__main__":
    add(Path(sys.argv[1]), generate())
