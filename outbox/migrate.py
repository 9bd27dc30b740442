"""Bring both databases to the newest schema, by Alembic.

Each database has a history of its own with two branches: ``machinery`` (what the outbox and the sinks need, kept
current by updates of this template) and ``domain`` (yours). A migration is a file in
``migrations/<database>/<branch>/``.
"""

from __future__ import annotations

import alembic.command
import alembic.context
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from outbox.database import connect
from outbox.errors import Failure
from outbox.settings import PROJECT_ROOT, BalancesRole, LedgerRole, Settings

BRANCHES = ("machinery", "domain")
OWNERS: dict[str, LedgerRole | BalancesRole] = {"ledger": LedgerRole.OWNER, "balances": BalancesRole.OWNER}


def migrate(settings: Settings) -> dict[str, list[str]]:
    """Upgrade both databases to their heads; return the revisions that were applied, by database, in order.

    Each database is upgraded in one transaction: wholly or not at all. Two at once wait for each other.
    Raises Failure naming the database that cannot be reached or whose migration failed.
    """
    return {database: _upgrade(settings, database) for database in OWNERS}


def owner_engine(settings: Settings, database: str) -> Engine:
    """An engine that connects as the owner of a database, anew each time."""
    return create_engine(
        "postgresql+psycopg2://", creator=lambda: connect(settings, OWNERS[database]), poolclass=NullPool
    )


def is_current(connection: Connection, database: str) -> bool:
    """Whether the schema has every migration of this code.

    A schema with migrations that this code does not know is current too: they come before the code that needs them.
    """
    scripts = ScriptDirectory.from_config(config(database))
    applied = MigrationContext.configure(connection).get_current_heads()
    try:
        return not any(scripts.iterate_revisions("heads", applied, implicit_base=True))
    except ResolutionError:
        return True


def config(database: str) -> Config:
    """Alembic's configuration of one database's history."""
    folder = PROJECT_ROOT / "migrations" / database
    made = Config()
    made.set_main_option("path_separator", "newline")  # a folder's name may contain the others
    made.set_main_option("script_location", _escaped(folder))
    made.set_main_option("version_locations", "\n".join(_escaped(folder / branch) for branch in BRANCHES))
    return made


def run() -> None:
    """What each ``env.py`` does: migrate on the connection that ``migrate`` has opened."""
    attributes = alembic.context.config.attributes
    alembic.context.configure(connection=attributes["connection"], on_version_apply=attributes["on_version_apply"])
    alembic.context.run_migrations()


def _upgrade(settings: Settings, database: str) -> list[str]:
    applied: list[str] = []
    wanted = config(database)
    try:
        with owner_engine(settings, database).begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('outbox migrate'))"))
            wanted.attributes["connection"] = connection
            wanted.attributes["on_version_apply"] = lambda step, **_: applied.extend(step.up_revision_ids)
            alembic.command.upgrade(wanted, "heads")
    except DBAPIError as error:
        raise Failure(f"migrating database {database}: {str(error.orig).strip()}", "nothing was changed") from error
    except CommandError as error:
        raise Failure(f"migrating database {database}: {error}", "deploy the code that knows it") from error
    return applied


def _escaped(path: object) -> str:
    """Alembic interpolates ``%`` in its options."""
    return str(path).replace("%", "%%")
