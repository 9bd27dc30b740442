"""What is wrong with a record, on the corpus of good and bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from outbox.sink.verdict import Header, Judge, Verdict
from outbox.writing.contract import Contract
from tests.paths import SCHEMA_FILE
from tests.records import ACCOUNT, GOOD, HEADERS, HEADERS_OF, VALUES, changed, raw
from tests.sink import NOW_MS

JUDGE = Judge(Contract(SCHEMA_FILE).schema, key="account_id")
NOTHING = "unreadable"  # the verdict on a record that should have passed


def pairs(headers: dict[str, Any]) -> list[Header]:
    return [(name, None if text is None else text.encode()) for name, text in headers.items()]


def verdict(
    value: bytes | None = changed(), headers: dict[str, Any] = HEADERS, key: bytes | None = ACCOUNT.encode()
) -> Verdict:
    return JUDGE.verdict(key, pairs(headers), value, NOW_MS)


@pytest.mark.parametrize("name", VALUES)
def test_the_fault_of_a_value_is_found(name: str) -> None:
    value, reason = VALUES[name]
    assert verdict(value).reason == (reason or NOTHING)


@pytest.mark.parametrize("name", HEADERS_OF)
def test_the_fault_of_headers_is_found(name: str) -> None:
    headers, reason = HEADERS_OF[name]
    assert verdict(headers=headers).reason == (reason or NOTHING)


@pytest.mark.parametrize("key", [b"other", None, b"\xff", b""])
def test_a_key_that_is_not_the_account_is_told(key: bytes | None) -> None:
    assert verdict(key=key) == ("key mismatch", "the record's key is not its account_id")


def test_the_detail_names_what_is_wrong() -> None:
    assert verdict(changed(amount="5")).detail == "$.amount: '5' is not of type 'integer'"
    assert "header eventType" in verdict(headers=HEADERS | {"eventType": "transfer.undone"}).detail
    assert "header schemaVersion" in verdict(headers={"id": HEADERS["id"], "eventType": "transfer.debited"}).detail


def test_a_detail_stays_short_however_long_the_value() -> None:
    assert len(verdict(changed(currency="x" * 1_000_000)).detail) < 300


def test_no_headers_is_a_missing_id() -> None:
    assert JUDGE.verdict(ACCOUNT.encode(), [], changed(), NOW_MS).reason == "missing id"


class TestReplay:
    """What a replay reads of a record that it judges again."""

    @staticmethod
    def judged(value: bytes | None, headers: dict[str, Any] = HEADERS) -> Verdict | dict[str, Any]:
        return JUDGE.judge(ACCOUNT.encode(), pairs(headers), value, NOW_MS)

    @pytest.mark.parametrize("name", VALUES)
    def test_values_are_read_if_nothing_is_wrong_with_them(self, name: str) -> None:
        value, reason = VALUES[name]
        found = self.judged(value)
        assert isinstance(found, dict) is (reason in (None, NOTHING))
        assert isinstance(found, dict) or found.reason == reason

    @pytest.mark.parametrize("name", HEADERS_OF)
    def test_headers_are_judged_too(self, name: str) -> None:
        headers, reason = HEADERS_OF[name]
        found = self.judged(changed(), headers)
        assert found == GOOD if reason is None else isinstance(found, Verdict) and found.reason == reason

    def test_only_what_the_schema_names_is_read(self) -> None:
        assert self.judged(changed(note="a\0")) == GOOD

    @pytest.mark.parametrize(
        ("text", "number"), [("7.0", 7), ("5e0", 5), ("1E+3", 1000), ("9007199254740993.0", 9007199254740993)]
    )
    def test_an_integer_is_read_exactly_however_it_is_written(self, text: str, number: int) -> None:
        assert self.judged(raw("amount", text)) == GOOD | {"amount": number}

    @pytest.mark.parametrize(
        "text", ["9007199254740993.5", "1e999999999", "1e-99999999999999999999", "1e99999999999999999999", "0.5"]
    )
    def test_what_is_no_integer_is_not_rounded_to_one(self, text: str) -> None:
        assert isinstance(self.judged(raw("amount", text)), Verdict)

    def test_half_a_character_is_no_text(self) -> None:
        assert JUDGE._value_fault(GOOD | {"currency": "\ud800"}) is not None
