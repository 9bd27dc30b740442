"""The composition root: settings in, WSGI application out."""

from __future__ import annotations

from flask import Flask
from outbox import Settings
from outbox.web import Service

from service.metrics import transfers_counter
from service.refusals import REFUSALS
from service.routes import ledger_api


def create_app(settings: Settings | None = None) -> Flask:
    """The ledger service. Raises Failure if the settings have no token."""
    service = Service("Ledger", settings, REFUSALS)
    return service.app(ledger_api(service, transfers_counter(service.metrics.registry)))
