"""The project's service in this process, on other databases than those of the fixtures."""

from __future__ import annotations

from flask import Flask

from outbox.base.settings import Settings
from stock.service import create_app


def app(settings: Settings) -> Flask:
    """The application, with connections for a few clients."""
    return create_app(settings.model_copy(update={"service_threads": 2}))
