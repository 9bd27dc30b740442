"""A service of a few routes, in Flask and in FastAPI, for tests of the machinery: no database, and no domain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from fastapi import APIRouter, BackgroundTasks, FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from flask import Flask, Response
from flask_openapi3.blueprint import APIBlueprint
from pydantic import BaseModel

from outbox import asgi, web
from outbox.base.settings import Settings
from outbox.http import problems
from outbox.http.problems import Kind

PATH = "/echo"
TITLE = "Echo" * 8_000  # makes /openapi.json as large as that of a service with many routes


class Text(BaseModel):
    text: str


class Name(BaseModel):
    name: str


Refusals = Mapping[type[Exception], Kind]


def create_app(
    settings: Settings | None = None, refusals: Refusals | None = None, fail: Callable[[], None] = lambda: None
) -> Flask:
    """The service in Flask. Its route /fail calls ``fail``. Raises Failure if the settings have no token."""
    api = APIBlueprint("echo", __name__, abp_security=web.SECURITY)

    @api.post(PATH, responses=problems.WRITING)
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

    @api.get("/fail")
    def failing() -> Response:
        fail()
        return Response()

    return web.Service(TITLE, settings, refusals).app(api)


def create_async_app(
    settings: Settings | None = None, refusals: Refusals | None = None, fail: Callable[[], None] = lambda: None
) -> FastAPI:
    """The service in FastAPI, with the same routes."""
    api = APIRouter(dependencies=asgi.SECURITY, default_response_class=PlainTextResponse)

    @api.post(PATH, responses=asgi.WRITING)
    async def echo(body: Text) -> str:
        return body.text

    @api.get("/texts/{name}")
    @api.delete("/texts/{name}")
    async def read(name: str) -> str:
        return name

    @api.post("/texts/{name}/read")
    @api.put("/texts/{name}/read")
    def mark(name: str) -> str:  # FastAPI runs it in a thread
        return name

    @api.get("/infinity")
    async def infinity() -> JSONResponse:
        return JSONResponse({"value": float("inf")})  # FastAPI itself would write null

    @api.get("/fail")
    async def failing() -> str:
        fail()
        return ""

    @api.post("/later")
    async def later(body: Text, tasks: BackgroundTasks) -> str:
        tasks.add_task(_copy, Path(body.text))
        return "soon"

    return asgi.Service(TITLE, settings, refusals).app(api)


async def _copy(folder: Path) -> None:
    """Wait until the folder has a file ``from``, and make ``to``."""
    while not (folder / "from").exists():
        await asyncio.sleep(0.01)
    (folder / "to").touch()
