"""The public API for services that write events.

Other public modules: `outbox.dbapi` without SQLAlchemy, `outbox.web` for Flask, `outbox.sinks` to declare sinks,
`outbox.migrations`, and `outbox.spark` for DataFrames. `outbox_lab` has those for development and tests. Everything
else is private and may change.

    from outbox import Event, append

    with engine.begin() as connection:
        connection.execute(...)                                                          # the change
        append(connection, Event("order", order_id, "placed", {"order_id": order_id}))  # and its event
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.base.heavy import exports

if TYPE_CHECKING:
    from outbox.base.errors import Failure
    from outbox.base.settings import Settings
    from outbox.base.settings import load as load_settings
    from outbox.writing.append import append
    from outbox.writing.event import Event
else:  # when they are used: few programs need all of them
    __getattr__ = exports(
        __name__,
        {
            "Event": "outbox.writing.event:Event",
            "Failure": "outbox.base.errors:Failure",
            "Settings": "outbox.base.settings:Settings",
            "append": "outbox.writing.append:append",
            "load_settings": "outbox.base.settings:load",
        },
    )

__all__ = ["Event", "Failure", "Settings", "append", "load_settings"]
