"""A loan: its row and its event are committed together, or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from django.db import connection
from outbox import Failure, Settings
from outbox_lab.testing import SinkRole, deliver, outbox_records, query
from outbox_lab.testing.contract import test_sinks_keep_their_contract  # noqa: F401

from loans.models import Book
from tests.conftest import Library

ISBN = "9780132350884"
# The service's process has none of these: what is None cannot be imported.
WITHOUT = ("sqlalchemy", "alembic", "pydantic", "psycopg2", "confluent_kafka", "flask", "fastapi")
SERVE = f"""
import json, sys
sys.modules.update(dict.fromkeys({WITHOUT}))
import django
django.setup()
from django.db import connection
from django.test import Client
connection.settings_dict |= json.loads(sys.argv[1])
response = Client().post("/books/{ISBN}/lend", {{"reader": "R-17"}}, content_type="application/json")
sys.exit(response.status_code != 201)
"""


def book(copies: int, isbn: str = ISBN) -> None:
    """A book of the library."""
    Book.objects.create(isbn=isbn, title="A book", copies=copies)


def test_a_loan_is_a_row_and_an_event(library: Library, databases: Settings) -> None:
    book(copies=2)
    assert library.lend(ISBN, "R-17").status_code == 201
    assert library.give_back(ISBN, "R-17").status_code == 201
    assert query(databases, "SELECT lent FROM loans_book") == [(0,)]
    lent, returned = outbox_records(databases)
    assert (lent["topic"], lent["key"], lent["value"]["reader"]) == ("library.book", ISBN, "R-17")
    assert [one["headers"]["eventType"] for one in (lent, returned)] == ["lent", "returned"]


def test_a_refused_loan_writes_nothing(library: Library, databases: Settings) -> None:
    book(copies=1)
    assert [library.lend(ISBN).status_code for _ in range(2)] == [201, 409]
    assert len(outbox_records(databases)) == 1


def test_an_event_that_is_not_valid_undoes_the_change(library: Library, databases: Settings) -> None:
    book(copies=1)
    with pytest.raises(Failure, match="reader"):
        library.lend(ISBN, reader="")
    assert query(databases, "SELECT lent FROM loans_book") == [(0,)]
    assert outbox_records(databases) == []


def test_the_service_needs_neither_sqlalchemy_nor_what_commands_need(library: Library, databases: Settings) -> None:
    book(copies=1)
    database = json.dumps(
        {name: connection.settings_dict[name] for name in ("HOST", "PORT", "NAME", "USER", "PASSWORD")}
    )
    subprocess.run([sys.executable, "-c", SERVE, database], env=os.environ, check=True)
    assert len(outbox_records(databases)) == 1


def test_the_sink_counts_each_event_once(library: Library, databases: Settings) -> None:
    book(copies=3)
    for _ in range(3):
        library.lend(ISBN)
    library.give_back(ISBN)
    for _ in range(2):
        deliver(databases, outbox_records(databases), "books")
    assert query(databases, "SELECT isbn, lent FROM books_lent", SinkRole.OWNER) == [(ISBN, 2)]
