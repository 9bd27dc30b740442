"""From the request to the sink, through real Postgres, Debezium, Kafka and Spark."""

from __future__ import annotations

from outbox import Settings
from outbox_lab.testing import SinkRole, query, run

from loans.models import Book
from tests.conftest import Library


def test_the_sink_agrees_with_the_service(chain: Settings, library: Library) -> None:
    isbns = [f"978013235088{number}" for number in range(3)]
    for isbn in isbns:
        Book.objects.create(isbn=isbn, title="A book", copies=5)
        assert [library.lend(isbn).status_code for _ in range(6)] == [201] * 5 + [409]
    library.give_back(isbns[0])
    run(chain, "check", "--wait", "60")
    run(chain, "sink", "--until-caught-up")
    run(chain, "check")
    lent = query(chain, "SELECT isbn, lent FROM books_lent ORDER BY isbn", SinkRole.OWNER)
    assert lent == [(isbns[0], 4), (isbns[1], 5), (isbns[2], 5)]
