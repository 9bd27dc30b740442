"""The sinks of the fixture domain keep the contract. An order is placed once, and its projection relies on that."""

from outbox_lab.testing.contract import contract

test_sinks_keep_their_contract = contract(once=["order.placed"], examples=4)
