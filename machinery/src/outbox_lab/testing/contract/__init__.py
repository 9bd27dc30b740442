"""Contract tests: a project's own sink jobs give one result, however their events are delivered.

# tests/test_contract.py
from outbox_lab.testing.contract import test_sinks_keep_their_contract  # noqa: F401
"""

from outbox_lab.testing.contract.contract import contract, test_sinks_keep_their_contract

__all__ = ["contract", "test_sinks_keep_their_contract"]
