"""Libraries that take long to import, and names of packages. Each is imported when it is first used.

`outbox events` then costs what it needs, although it imports modules that run sinks, and a service that writes events
loads no Spark.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

    import psycopg2
    import pyarrow as pa
    import pyarrow.compute as pc
    import requests
    from psycopg2 import extensions, extras, sql
else:

    class _Library:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            # Not from sys.modules: another thread may be in the middle of the import, for which this waits.
            return getattr(importlib.import_module(self._name), name)

    pa, pc, requests = map(_Library, ("pyarrow", "pyarrow.compute", "requests"))
    asyncio, psycopg2 = map(_Library, ("asyncio", "psycopg2"))
    extensions, extras, sql = map(_Library, ("psycopg2.extensions", "psycopg2.extras", "psycopg2.sql"))

__all__ = ["asyncio", "exports", "extensions", "extras", "pa", "pc", "psycopg2", "requests", "sql"]


def exports(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The function ``__getattr__`` of a package (PEP 562). ``places``: by exported name ``module:name``."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return pkgutil.resolve_name(places[name])

    return get
