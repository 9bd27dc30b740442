"""The ledger's own Prometheus metric."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

OUTCOMES = ("created", "refused", "repeated")


def transfers_counter(registry: CollectorRegistry) -> Counter:
    """`ledger_transfers_total`: transfer requests that the rules have decided, by outcome.

    `repeated` is an earlier response, sent again for its Idempotency-Key. Requests that were invalid or failed are
    counted in `http_request_duration_seconds` only.
    """
    transfers = Counter(
        "ledger_transfers",
        f"Transfer requests by outcome: {', '.join(OUTCOMES)}",
        ["outcome"],
        registry=registry,
    )
    for outcome in OUTCOMES:
        transfers.labels(outcome)  # exists from the start, so that the first of its kind is seen as an increase
    return transfers
