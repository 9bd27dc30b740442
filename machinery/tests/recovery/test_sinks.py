"""Recoveries of the sinks: their database, their checkpoints, their topics, and what others write to these."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from psycopg2 import extensions

from outbox.base.settings import SinkRole
from tests.support.rehearsal import Rehearsal
from tests.support.sink_driver import Database
from tests.support.sink_process import checkpoint
from tests.support.topic_reader import relayed

Rehearse = Callable[[str], Rehearsal]


def test_checkpoint_that_was_lost(rehearsal: Rehearse) -> None:
    one = rehearsal("The checkpoint is lost")
    one.working(1, 2)
    shutil.rmtree(checkpoint(one.settings))
    one.move(3)
    relayed(one.settings)
    one.diagnosed()
    one.follow()
    one.sound()
    assert Database(one.settings).applied() == 3 + 2, "nothing was applied twice"


def test_sink_database_that_was_restored_from_a_backup(rehearsal: Rehearse, superuser: extensions.cursor) -> None:
    one = rehearsal("The sink database was restored from a backup")
    one.working(1, 2)
    name, owner = one.settings.sink_db_name, one.settings.role_name(SinkRole.OWNER)
    superuser.execute(f"CREATE DATABASE {name}_backup TEMPLATE {name} OWNER {owner}")
    one.working(3, 4)
    superuser.execute(f"DROP DATABASE {name} WITH (FORCE)")
    superuser.execute(f"ALTER DATABASE {name}_backup RENAME TO {name}")
    assert Database(one.settings).applied() == 2, "the backup lacks two events"
    one.diagnosed()
    one.follow()
    assert Database(one.settings).applied() == 4
    one.sound()
