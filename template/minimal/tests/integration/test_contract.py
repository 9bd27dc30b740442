"""Every sink gives one result, however its events are delivered (docs/reference.md, `outbox.testing.contract`)."""

from outbox.testing.contract import test_sinks_keep_their_contract  # noqa: F401
