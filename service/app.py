"""The composition root: settings in, WSGI application out."""

from __future__ import annotations

from flask import Flask

from outbox.base import settings as configuration
from outbox.base.settings import Settings
from outbox.http.app import make_app
from outbox.http.database import make_engine
from outbox.http.metrics import Metrics
from service.metrics import transfers_counter
from service.refusals import REFUSALS
from service.routes import ledger_api


def create_app(settings: Settings | None = None) -> Flask:
    """The ledger service. Raises Failure if the settings have no token."""
    settings = settings or configuration.load()
    engine = make_engine(settings)
    metrics = Metrics()
    ledger = ledger_api(engine, transfers_counter(metrics.registry), settings)
    return make_app(settings, engine, metrics, title="Ledger", apis=[ledger], refusals=REFUSALS)
