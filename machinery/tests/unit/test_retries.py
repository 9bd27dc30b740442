"""Which failures a sink survives by itself, and for how long it tries."""

from __future__ import annotations

import pytest

from outbox.sink.running.supervisor import FAILURES_MAX, MAX_DELAY_S, WITHIN_S, Retries


def test_the_delay_doubles_up_to_its_bound_and_then_the_sink_gives_up() -> None:
    retries = Retries()
    delays = [retries.delay_s("database-busy", float(number)) for number in range(FAILURES_MAX)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_DELAY_S] * (FAILURES_MAX - 7), None]
    assert retries.are_exhausted


def test_a_batch_that_was_applied_ends_the_count() -> None:
    retries = Retries()
    for _ in range(3 * FAILURES_MAX):
        assert retries.delay_s("topic-silent", 0.0) == 1.0
        retries.succeeded()
    assert not retries.are_exhausted


def test_failures_of_long_ago_do_not_count() -> None:
    retries = Retries()
    for number in range(3 * FAILURES_MAX):
        assert retries.delay_s("database-unavailable", number * (WITHIN_S + 1)) == 1.0


@pytest.mark.parametrize("code", ["topic-missing", "token-server-unavailable"])
def test_what_may_pass_is_tried_again(code: str) -> None:
    assert Retries().delay_s(code, 0.0) == 1.0


@pytest.mark.parametrize(
    "code",
    ["checkpoint-unusable", "events-lost", "kafka-login-refused", "sink-fenced", "sink-has-driver", "unexpected"],
)
def test_what_does_not_pass_is_never_tried_again(code: str) -> None:
    retries = Retries()
    assert retries.delay_s(code, 0.0) is None
    assert not retries.are_exhausted


def test_what_passes_in_another_process_alone_ends_this_one_at_once() -> None:
    retries = Retries()
    assert retries.delay_s("event-loop-blocked", 0.0) is None
    assert retries.are_exhausted
