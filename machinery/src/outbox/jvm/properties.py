"""Files of properties, as Java and Spark read them."""

from __future__ import annotations

import re


def property_value(name: str, properties: str) -> str | None:
    """The value of a property in the content of a file, or None. The last of two equal names counts."""
    found = re.findall(rf"^\s*{re.escape(name)}(?:\s*[=:]\s*|\s+)(\S+)\s*$", properties, re.MULTILINE)
    return found[-1] if found else None
