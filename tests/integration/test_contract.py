"""Every sink gives one result, however its events are delivered."""

from outbox.testing.contract import contract

# Half as many histories as by default: six of the sinks share a projection, which sees all of theirs.
test_sinks_keep_their_contract = contract(examples=4)
