"""The sinks of the fixture domain keep the contract."""

from outbox.testing.contract import test_sinks_keep_their_contract  # noqa: F401
