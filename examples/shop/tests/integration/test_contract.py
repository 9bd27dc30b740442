"""Every sink gives one result, however its events are delivered (docs/reference.md, `outbox_lab.testing.contract`)."""

from outbox_lab.testing.contract import contract

test_sinks_keep_their_contract = contract(once=["order.placed"], begins=["order.placed"])
