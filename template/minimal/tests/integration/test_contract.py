"""Every sink gives one result, however its events are delivered (docs/reference.md, `outbox_lab.testing.contract`)."""

from outbox_lab.testing.contract import test_sinks_keep_their_contract  # noqa: F401
