"""The names that occur in the SQL of the sinks, which properties of a test's events have too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import outbox
from outbox.base.sections import COMMENT
from outbox.events.catalog import RESERVED, RESERVED_PREFIX, SYSTEM
from tests.support.declared import NUMBER
from tests.support.suite import DOMAIN

PACKAGE = Path(outbox.__file__).parent
SQL = re.compile(r"\b(SELECT|FROM|WHERE|AND|INSERT|CREATE|SET|CASE)\b")
KINDS: list[dict[str, Any]] = [{"type": "string"}, {"type": "string", "format": "uuid"}, NUMBER]


def statements() -> Iterator[str]:
    """The SQL of the sinks, some of it in pieces."""
    for file in sorted((PACKAGE / "sink").rglob("strategies/*.sql")):
        yield COMMENT.sub("", file.read_text())
    for file in sorted((DOMAIN / "stock" / "sinks").glob("*/strategies/*.sql")):
        yield COMMENT.sub("", file.read_text())
    for room in ("remembering", "applying", "repair"):
        for file in sorted((PACKAGE / "sink" / room).rglob("*.py")):
            assigned = [one for one in ast.parse(file.read_text()).body if isinstance(one, ast.Assign | ast.AnnAssign)]
            for one in assigned:
                for node in ast.walk(one):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.search(node.value):
                        yield node.value


@cache
def words() -> Sequence[str]:
    """All names in the SQL of the sinks that a property can have, in any case once."""
    found = {word.lower() for text in statements() for word in re.findall(r"[A-Za-z_]\w*", text)}
    assert {"batch", "conv", "incoming", "identity", "topic", "taken", "blocker", "letter", "select"} <= found
    return sorted(word for word in found - RESERVED - SYSTEM if not word.startswith(RESERVED_PREFIX))
