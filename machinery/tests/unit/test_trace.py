"""Which traceparents are valid, and what they say."""

from __future__ import annotations

import pytest

from outbox.base import trace

PARENT = "0123456789abcdef"
TRACE = PARENT * 2


@pytest.mark.parametrize(
    ("traceparent", "valid"),
    [
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", True),
        (f"cc-{TRACE}-{PARENT}-01", True),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"00-{TRACE}-{PARENT}-01\n", False),
        (f"00-{TRACE}-{PARENT}", False),
        ("", False),
        (None, False),
    ],
)
def test_a_traceparent_is_taken_only_if_it_is_valid(traceparent: str | None, valid: bool) -> None:
    assert trace.valid(traceparent) == (traceparent if valid else None)
    assert trace.trace_id(traceparent) == (TRACE if valid else None)
    assert valid or not trace.is_sampled(traceparent)


@pytest.mark.parametrize(
    ("flags", "sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True), ("1", False)]
)
def test_sampled_is_the_lowest_bit_of_the_flags(flags: str, sampled: bool) -> None:
    assert trace.is_sampled(f"00-{TRACE}-{PARENT}-{flags}") == sampled
