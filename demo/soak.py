"""What the soak must know of this project: its clients, what their changes are, and what must always hold.

`outbox soak` breaks the chain at random while these clients send. A project of another domain replaces this file.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from outbox.soak import Event, History, Refusal, Request

from demo.workload import Workload

READ_SHARE = 0.2
STATUSES = {"opened": "open", "frozen": "frozen", "closed": "closed"}  # after an event
INVARIANTS = {
    "no money is made or lost": """
        SELECT format('all balances together are %s', sum(balance_minor)) FROM accounts HAVING sum(balance_minor) <> 0
    """,
    "a balance is the sum of its account's transfers": """
        SELECT format('account %s has %s, and its transfers come to %s', id, balance_minor, moved)
          FROM accounts
          LEFT JOIN (SELECT account_id, sum(amount_minor) AS moved
                       FROM (SELECT to_account_id AS account_id, amount_minor FROM transfers
                             UNION ALL
                             SELECT from_account_id, -amount_minor FROM transfers) AS side
                      GROUP BY account_id) AS sums ON account_id = id
         WHERE balance_minor <> coalesce(moved, 0)
    """,
}


class Domain(Workload):
    """Accounts are opened, frozen and closed, money is transferred, and accounts are read."""

    sinks = (
        ("balances", "balances-merge", "balances-versions", "balances-upsert"),
        ("balances-naive-logged", "balances-offsets", "accounts", "turnover"),
    )
    changes = """
        SELECT 'transfer ' || id, 2 FROM transfers
        UNION ALL
        SELECT format('account %s open', id), 1 FROM accounts
        UNION ALL
        SELECT format('account %s frozen', id), 1 FROM accounts
         WHERE status = 'frozen' OR status = 'closed' AND account_version = 3
        UNION ALL
        SELECT format('account %s closed', id), 1 FROM accounts WHERE status = 'closed'
    """
    invariants: Mapping[str, str] = INVARIANTS
    refusals: Mapping[str, Refusal] = {
        "balances": Refusal(
            "currency mismatch",
            begin="UPDATE balances SET currency = 'XXX' WHERE sink = 'balances'",
            end="UPDATE balances SET currency = 'EUR' WHERE sink = 'balances'",
        )
    }

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._reads = random.Random(f"{seed} reads")

    def plan(self) -> Request:
        """What the walkthrough sends, and reads of accounts."""
        if self._reads.random() < READ_SHARE:
            account = self._reads.choice(self._accounts)
            return Request("read", f"/accounts/{account}", None, (200,), method="GET", has_key=False)
        return super().plan()

    def change_of_answer(self, body: Any) -> str:
        """A transfer by its id; a step in the life of an account by its new status."""
        return f"transfer {body['id']}" if "from_account" in body else f"account {body['id']} {body['status']}"

    def change_of_event(self, event: Event) -> str:
        """The same of an event."""
        if "transfer_id" in event.data:
            return f"transfer {event.data['transfer_id']}"
        return f"account {event.key} {STATUSES[event.type.split('.')[1]]}"

    def contradictions(self, history: History, events: Mapping[str, Event]) -> Iterable[str]:
        """A balance that was read is the one after the event of the version that was read."""
        after = {
            (event.key, event.version): event.data["balance_after"]
            for event in events.values()
            if "balance_after" in event.data
        }
        for read in history.reads:
            account = read.answer
            balance = after.get((account["id"], account["version"]), 0 if account["version"] == 0 else None)
            if balance != account["balance"]:
                yield f"account {account['id']} version {account['version']}: read {account['balance']}, was {balance}"
