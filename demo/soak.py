"""The project's part of the soak: its clients, their changes, and its invariants.

`outbox soak` breaks the chain at random while these clients send. A project of another domain replaces this file.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from outbox_lab.soak import Effects, History, Refusal, Request, TopicEvent

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
        ("balances", "balances-merge", "balances-versions"),
        ("balances-naive-logged", "balances-offsets", "changes"),
        ("lakehouse", "turnover"),
    )
    plain = ("balances-upsert", "accounts", "feed")  # which a process without Spark runs
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
        ),
        "statements": Refusal(
            "handler failed",  # for a third of the events, at random
            begin="ALTER TABLE statement_lines ADD CONSTRAINT refused CHECK (uuid_hash(event_id) % 3 <> 0) NOT VALID",
            end="ALTER TABLE statement_lines DROP CONSTRAINT IF EXISTS refused",
        ),
    }
    handlers: Mapping[str, Effects] = {
        "statements": Effects(
            "statement_lines",
            query="SELECT account_id::text, event_id::text FROM statement_lines ORDER BY account_id, line",
        )
    }

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._reads = random.Random(f"{seed} reads")

    def plan(self) -> Request:
        """A request of the walkthrough, or a read of an account."""
        if self._reads.random() < READ_SHARE:
            account = self._reads.choice(self._accounts)
            return Request("read", f"/accounts/{account}", None, (200,), method="GET", has_key=False)
        return super().plan()

    def change_of_answer(self, body: Any) -> str:
        """A transfer by its id; a step in the life of an account by its new status."""
        return f"transfer {body['id']}" if "from_account" in body else f"account {body['id']} {body['status']}"

    def change_of_event(self, event: TopicEvent) -> str:
        """The change that an event belongs to."""
        if "transfer_id" in event.data:
            return f"transfer {event.data['transfer_id']}"
        return f"account {event.key} {STATUSES[event.type.split('.')[1]]}"

    def contradictions(self, history: History, events: Mapping[str, TopicEvent]) -> Iterable[str]:
        """A balance that was read is the one after the event of its version. A read is not older than a change of its
        account that was acknowledged, or read, before it was sent, and finds the account from then on.
        """
        after = {
            (event.key, event.version): event.data["balance_after"]
            for event in events.values()
            if "balance_after" in event.data
        }
        acknowledged = Acknowledged(self._told(history, events))
        for read in history.reads:
            account = read.path.rpartition("/")[2]
            oldest = acknowledged.before(account, read.sent_s)
            if read.outcome == "failed":
                if oldest is not None:
                    yield f"account {account}: {read.status} to a read, and version {oldest} was acknowledged before"
                continue
            version, balance = read.answer["version"], read.answer["balance"]
            if balance != after.get((account, version), 0 if version == 0 else None):
                yield f"account {account} version {version}: read {balance}, was {after.get((account, version))}"
            if oldest is not None and version < oldest:
                yield f"account {account}: read version {version}, and {oldest} was acknowledged before"

    def _told(self, history: History, events: Mapping[str, TopicEvent]) -> Iterator[tuple[str, float, int]]:
        """The versions of accounts that clients knew of, and since when: 0 of an opening, then those of transfers. An
        earlier read tells them too.
        """
        for read in history.reads:
            if read.outcome == "ok":
                yield read.path.rpartition("/")[2], read.ended_s, read.answer["version"]
        since: dict[str, float] = {}
        for operation in history.operations.values():
            if operation.outcome == "ok" and operation.acknowledged_s is not None:
                since[self.change_of_answer(operation.answers[0][1])] = operation.acknowledged_s
        for event in events.values():
            time_s = since.get(self.change_of_event(event))
            if time_s is not None and event.type.startswith("account.opened"):
                yield event.key, time_s, 0
            elif time_s is not None and "balance_after" in event.data and event.version is not None:
                yield event.key, time_s, event.version


class Acknowledged:
    """The versions of accounts that clients knew of."""

    def __init__(self, told: Iterable[tuple[str, float, int]]) -> None:
        """``told``: account, time in seconds, and version."""
        self._times_s: dict[str, list[float]] = defaultdict(list)
        self._highest: dict[str, list[int]] = defaultdict(list)
        for account, time_s, version in sorted(told, key=lambda one: one[1]):
            highest = self._highest[account]
            highest.append(max(version, highest[-1]) if highest else version)
            self._times_s[account].append(time_s)

    def before(self, account: str, time_s: float) -> int | None:
        """The highest version that somebody knew of before a time; None if nobody knew the account."""
        count = bisect_left(self._times_s[account], time_s)
        return self._highest[account][count - 1] if count else None
