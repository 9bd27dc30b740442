"""Every sink gives one result, however its events are delivered."""

from outbox_lab.testing.contract import contract

# Half as many histories as by default: six of the sinks share a projection, which sees all of theirs. `turnover`, which
# has a transform, has one: test_turnover tries its re-reads, letters and rebuild on the chain.
test_sinks_keep_their_contract = contract(examples=4)
