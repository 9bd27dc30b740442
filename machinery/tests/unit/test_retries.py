"""Which failures a sink survives by itself, and for how long it tries."""

from __future__ import annotations

import pytest

from outbox.sink.running.supervisor import FAILURES_MAX, MAX_DELAY_S, WITHIN_S, Retries


def test_the_delay_doubles_up_to_its_bound_and_then_the_sink_gives_up() -> None:
    retries = Retries()
    delays = [retries.delay_s("database-busy", float(number)) for number in range(FAILURES_MAX)]
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, *[MAX_DELAY_S] * (FAILURES_MAX - 7), None]
    assert retries.are_exhausted


def test_failures_before_a_success_and_of_long_ago_do_not_count() -> None:
    retries = Retries()
    for _ in range(3 * FAILURES_MAX):
        assert retries.delay_s("topic-silent", 0.0) == 1.0
        retries.succeeded()
    for number in range(3 * FAILURES_MAX):
        assert retries.delay_s("database-unavailable", number * (WITHIN_S + 1)) == 1.0


@pytest.mark.parametrize(
    ("code", "delay_s", "is_exhausted"),
    [
        ("topic-missing", 1.0, False),
        ("token-server-unavailable", 1.0, False),
        *((code, None, False) for code in ("checkpoint-unusable", "events-lost", "kafka-login-refused")),
        *((code, None, False) for code in ("sink-fenced", "sink-has-driver", "unexpected")),
        ("event-loop-blocked", None, True),  # passes in another process alone
    ],
)
def test_only_what_may_pass_is_tried_again(code: str, delay_s: float | None, is_exhausted: bool) -> None:
    retries = Retries()
    assert retries.delay_s(code, 0.0) == delay_s
    assert retries.are_exhausted is is_exhausted
