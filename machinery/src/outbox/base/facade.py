"""Names of a package that are imported when they are first used: a service that writes events loads no Spark."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The function ``__getattr__`` of a package (PEP 562). ``places``: by exported name ``module:name``."""

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return pkgutil.resolve_name(places[name])

    return get
