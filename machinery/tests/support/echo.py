"""A service of one route, for tests of the machinery: it needs no database and knows no domain."""

from __future__ import annotations

from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel

from outbox.base.settings import Settings, load
from outbox.http.app import SECURITY, Metrics, make_app
from outbox.http.database import make_engine

PATH = "/echo"
TITLE = "Echo" * 8_000  # makes /openapi.json as large as that of a service with many routes


class Text(BaseModel):
    """A text to send back."""

    text: str


class Name(BaseModel):
    """The name in a path."""

    name: str


def create_app(settings: Settings | None = None) -> Flask:
    """The service. Raises Failure if the settings have no token."""
    settings = settings or load()
    engine = make_engine(settings)
    api = APIBlueprint("echo", __name__, abp_security=SECURITY)

    @api.post(PATH)
    def echo(body: Text) -> Response:
        return Response(body.text, mimetype="text/plain")

    @api.get("/texts/<name>")
    @api.delete("/texts/<name>")
    def read(path: Name) -> Response:
        return Response(path.name, mimetype="text/plain")

    @api.post("/texts/<name>/read")
    @api.put("/texts/<name>/read")
    def mark(path: Name) -> Response:
        return Response(path.name, mimetype="text/plain")

    @api.get("/infinity")
    def infinity() -> dict[str, float]:
        return {"value": float("inf")}

    return make_app(settings, engine, Metrics(), title=TITLE, apis=[api])
