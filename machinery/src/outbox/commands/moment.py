"""A point in time as an option of a command."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click


class Moment(click.ParamType[datetime]):
    """A date or a time in ISO 8601; UTC if it has no offset."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Fails with wrong usage if it is neither."""
        try:
            found = value if isinstance(value, datetime) else datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a time like 2026-11-21T05:00:00Z", param, ctx)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
