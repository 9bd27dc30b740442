"""Every sink gives one result, however its events are delivered. An account is opened once."""

from outbox.testing.contract import contract

test_sinks_keep_their_contract = contract(once=["account.opened"])
