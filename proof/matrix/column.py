"""Measure one fault: what it has repeated to each sink, and how far each sink has drifted by that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from outbox.kafka import topics
from outbox.sink import discovery

from proof.matrix import sink_log, topic_log
from proof.matrix.chain import SINKS, Chain
from proof.matrix.faults import Fault, NotFired
from proof.matrix.ledger import Ledger
from proof.matrix.topic_log import Offsets, Record


@dataclass(frozen=True)
class Cell:
    """The effect of one fault on one sink."""

    repeats: int  # records that repeated an event to the sink
    drift: int  # the sum of the absolute drifts of all accounts, in minor units
    due: int  # the drift by what the strategy promises: that of the repeats that it does not recognise


def measure(chain: Chain, ledger: Ledger, fault: Fault) -> tuple[dict[str, Cell], str]:
    """By strategy what the fault did, and the evidence that it happened. Raises NotFired if it did not."""
    chain.wait_relayed()
    chain.wait_applied()
    before = _Before(chain)
    evidence = fault.fire(chain, lambda: ledger.burst(fault.name))
    ledger.touch_each()
    chain.wait_relayed()
    chain.wait_applied()
    drift, logs = _drifts(chain), {topic: chain.log(topic) for topic in {*chain.topics.values()}}
    cells = {strategy: before.cell(sink, logs[chain.topics[sink]], drift[sink]) for strategy, sink in SINKS.items()}
    is_prevented = fault.is_of_relay and chain.exactly_once
    if not is_prevented and not cells["naive"].repeats:
        raise NotFired(f"{fault.name} has repeated nothing, although {evidence}")
    return cells, evidence


class _Before:
    """The state before the fault, to compare with."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._log_bytes = sink_log.size_bytes(chain.process.log_file)
        self._ends = {topic: topics.last_stable_offsets(chain.settings, topic) for topic in {*chain.topics.values()}}
        self._drift = _drifts(chain)

    def cell(self, sink: str, records: Sequence[Record], drift: Mapping[str, Decimal]) -> Cell:
        """The effect on a sink since then. Raises NotFired if its log contradicts the records of its topic."""
        end = self._ends[self._chain.topics[sink]]
        known = [record for record in records if record.offset < end.get(record.partition, 0)]
        new = [record for record in records if record.offset >= end.get(record.partition, 0)]
        re_sent = topic_log.repeats(known, new)
        work = sink_log.read(self._chain.process.log_file, self._log_bytes).get(sink, sink_log.Work())
        re_read = self._re_read(sink, records, work)
        if work.rows != len(new) + len(re_read):
            raise NotFired(f"sink {sink} has logged {work.rows} rows, not {len(new)} and {len(re_read)} again")
        due = {"all": [], "re-reads": re_sent, "none": [*re_sent, *re_read]}
        promise = discovery.chosen(self._chain.settings, sink).strategy.repeats
        before = self._drift[sink]
        return Cell(
            repeats=len(re_sent) + len(re_read),
            drift=int(sum(abs(drift.get(key, Decimal(0)) - before.get(key, Decimal(0))) for key in {*drift, *before})),
            due=_sum_of_sizes(due[promise]),
        )

    def _re_read(self, sink: str, records: Iterable[Record], work: sink_log.Work) -> list[Record]:
        """The records between where the sink began to read when it was started, and its positions at that time."""
        if not work.beginnings:
            return []
        if len(work.beginnings) > 1:
            raise NotFired(f"sink {sink} was restarted {len(work.beginnings)} times")
        end: Offsets = self._chain.positions_at_start[sink]
        return [record for record in records if record.is_within(work.beginnings[0], end)]


def _drifts(chain: Chain) -> dict[str, Mapping[str, Decimal]]:
    """By sink and account, the balance in the sink minus that in the source."""
    report = chain.check()
    return {sink: report.sink(sink).drift for sink in chain.sinks}


def _sum_of_sizes(repeated: Iterable[Record]) -> int:
    totals: Counter[str] = Counter()
    for record in repeated:
        totals[record.key] += record.amount
    return sum(map(abs, totals.values()))
