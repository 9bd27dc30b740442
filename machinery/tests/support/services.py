"""The fixture domain's services: one in each framework, with the same routes."""

from __future__ import annotations

from pathlib import Path

from outbox.base import project
from tests.support import suite

SERVICES = {"flask": "stock.service:create_app", "fastapi": "stock.async_service:create_app"}


def project_of(service: str, folder: Path) -> Path:
    """A copy of the fixture domain that runs this service."""
    root = suite.copied_to(folder / "project")
    file = root / project.FILE
    file.write_text(file.read_text().replace(SERVICES["flask"], service))
    return root
