"""The fixtures: real servers, shared by the session; databases, topic, slot and checkpoint of each test its own."""

from __future__ import annotations

pytest_plugins = [
    "tests.fix_stack",
    "tests.fix_databases",
    "tests.fix_chain",
    "tests.fix_service",
    "tests.fix_secured",
    "tests.fix_spark",
]
