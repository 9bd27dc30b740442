"""Every sink gives one result, however its events are delivered."""

from outbox.testing.contract import test_sinks_keep_their_contract  # noqa: F401
