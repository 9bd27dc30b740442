"""How the page reads records, whatever others wrote to the topics."""

from __future__ import annotations

from typing import NoReturn

import pytest
from confluent_kafka import Message

from demo.page.probe import _record, is_uuid

ID = "01990a6f-3c1e-7a10-8f00-0123456789ab"


class Unreadable(Message):
    """A record with a header whose name is not UTF-8, as confluent-kafka reports it."""

    def headers(self) -> NoReturn:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


def test_a_record_with_unreadable_headers_has_none() -> None:
    found = _record(Unreadable(topic="ledger.balance", partition=1, offset=7, key=b"k", value=b"{}"))
    assert (found.topic, found.partition, found.offset) == ("ledger.balance", 1, 7)
    assert (found.event_id, found.headers) == (None, {})


@pytest.mark.parametrize("text", [ID, ID.upper()])
def test_an_id_in_the_usual_form_is_a_uuid(text: str) -> None:
    assert is_uuid(text)


@pytest.mark.parametrize(
    "text", ["", "none", f"urn:uuid:{ID}", f"{{{ID}}}", ID.replace("-", ""), f"0-{ID[1:]}", ID.replace("9", "９")]
)
def test_what_postgres_may_refuse_is_no_uuid(text: str) -> None:
    assert not is_uuid(text)
